"""Configuration of agents."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Annotated, Any, Literal

from strop.agents.envs.config import EnvironmentConfig, check_credit
from strop.agents.interactions.settings import check_interactions
from strop.agents.openai_server.settings import OpenAIAgentConfig
from strop.agents.tools.settings import check_tools
from strop.config.sections import section
from strop.utils.field_types import NonNegativeInt, PositiveFloat, PositiveInt
from strop.utils.setting_text import setting_text
from strop.utils.user_files import absolute_path

SINGLE_TURN = "single_turn_agent"
"""Name of the agent that is always there."""
AGENTS_IN_A_WORLD = frozenset({"env_agent", "openai_agent", "openrlhf_agent"})
"""Names of agents that are given no tools, and score their episodes themselves."""
BUILT_IN_AGENTS = AGENTS_IN_A_WORLD | {SINGLE_TURN, "interaction_agent", "tool_agent"}


@section("agent")
class AgentConfig:
    """Agents and their tools. A setting whose default is "" or () names files; a section has `code_references` and
    `with_absolute_paths`."""

    default_agent: str = SINGLE_TURN
    """Agent of the rows that name none in a column agent_name: single_turn_agent, tool_agent, or one of your own
    (agent.files) or of an installed package (docs/packages.md)."""
    files: tuple[str, ...] = ()
    """Python files that register agents, tools or tool-call formats of your own. Relative paths start at the
    current directory."""
    max_assistant_turns: PositiveInt | None = None
    """Most answers of the model in one episode; null: as many as fit, in at most 256 training sequences."""
    max_user_turns: PositiveInt | None = None
    """Most replies to the model, of tools or of a user; null: as many as fit."""
    timeout_s: PositiveFloat = 3600.0
    """Wall-clock limit of one episode, in seconds. The built-in agents with turns end with what they have then; an
    agent of your own fails."""
    tool_timeout_s: PositiveFloat = 60.0
    """Wall-clock limit of one call of a tool, an interaction or an environment, in seconds."""
    num_workers: Annotated[NonNegativeInt, "0 plays them where tokens are generated"] = 0
    """Processes of each rank over which its episodes are spread, for agents and environments that compute; 0: they are
    played where tokens are generated. Each process has tools, servers of tools and a sandbox of its own, with their
    limits. Tokens are the same for any number. Not with models that read images."""
    loops: str = ""
    """YAML list of agent loops: name, _target_ (FILE.py:CLASS, or a dotted path) and further constructor arguments."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """Credit of the rewards of single answers of env_agent. trajectory: an episode is one sample, each reward on
    the last token of its answer. turn: every answer is a sample of its own, worth the rewards from it on, without
    discount, and estimators that compare the samples of a prompt compare all answers of all its episodes."""
    interactions: str = ""
    """YAML file with interactions: users that answer the model in episodes of interaction_agent."""
    tools: str = ""
    """YAML file with tool classes, their settings and schemas."""
    function_tools: str = ""
    """Python file with functions marked @function_tool; or names of such tools that installed packages bring
    (docs/packages.md), with commas between them."""
    tool_format: str = "auto"
    """Format in which the model writes tool calls, also to an agent behind the gateway and in `strop serve`; auto: as
    its chat template writes them. One of your own (agent.files) or of an installed package (docs/packages.md) too."""
    max_parallel_calls: PositiveInt = 1
    """Tool calls of one answer that are carried out; the others are answered with a sentence that says so."""
    max_tool_response_tokens: PositiveInt = 256
    """Tokens of one tool result; longer ones are cut."""
    tool_response_truncation: Literal["left", "right", "middle"] = "middle"
    """Side on which a long tool result is cut: left keeps its end, right its beginning, middle both."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    openai: OpenAIAgentConfig = field(default_factory=OpenAIAgentConfig)

    def __post_init__(self) -> None:
        check_credit(self)
        check_interactions(self)
        check_tools(self)
        # Where nothing else can be played, settings that a single turn does not read are refused.
        fields = dataclasses.fields(self)
        changed = [setting for setting in fields if getattr(self, setting.name) != _default(setting)]
        if self.default_agent != SINGLE_TURN or any(_names_code(setting) for setting in changed):
            return
        keys = [f"agent.{setting.name}" for setting in fields if _names_code(setting)]
        for setting in changed:
            if setting.name not in ("timeout_s", "tool_format"):  # the latter is for `strop serve` too
                value = setting_text(getattr(self, setting.name))
                raise ValueError(
                    f"agent.{setting.name} is {value}, but single_turn_agent, the only one of this run, has no use for "
                    f"it: name more for it to do ({', '.join(keys)}), or remove it"
                )

    def with_absolute_paths(self) -> AgentConfig:
        """For processes that may have another current directory."""
        changed: dict[str, Any] = {}
        for setting in dataclasses.fields(self):
            value: Any = getattr(self, setting.name)
            if setting.default == ():
                changed[setting.name] = tuple(absolute_path(path) for path in value)
            elif setting.default == "":
                is_names = setting.name == "function_tools" and not value.endswith(".py")
                changed[setting.name] = value if is_names else absolute_path(value)
            elif setting.default_factory is not dataclasses.MISSING:
                changed[setting.name] = value.with_absolute_paths()
        return dataclasses.replace(self, **changed)


def _default(setting: dataclasses.Field[Any]) -> Any:
    return setting.default if setting.default_factory is dataclasses.MISSING else setting.default_factory()


def _names_code(setting: dataclasses.Field[Any]) -> bool:
    """True for a setting that names files, or a section that does: more than single turns can be played then."""
    return setting.default in ("", ()) or setting.default_factory is not dataclasses.MISSING
