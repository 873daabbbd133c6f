"""Configuration of what happens between a prompt and its final answer."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

SINGLE_TURN, TOOL_AGENT = "single_turn_agent", "tool_agent"
ENV_AGENT, INTERACTION_AGENT = "env_agent", "interaction_agent"
"""Names of the agents that are built in."""
BUILT_IN = (SINGLE_TURN, TOOL_AGENT, ENV_AGENT, INTERACTION_AGENT)


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    name: str = ""
    """Environment that env_agent plays: gymnasium, reasoning_gym, verifiers, verifiers_classic, openenv, a name
    registered in one of agent.files, FILE.py:CLASS, or the dotted path of a class. A row's extra_info.env_name comes
    first."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Its arguments; those of a row, extra_info.env_kwargs, are added."""

    def __post_init__(self) -> None:
        if self.kwargs and not self.name:
            raise ValueError(
                f"agent.environment.kwargs has {sorted(self.kwargs)[0]!r}, but agent.environment.name is empty: name "
                f"the environment, or remove them"
            )


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    default_agent: str = SINGLE_TURN
    """Who plays the rows that name no agent in a column agent_name: single_turn_agent, tool_agent, or an agent of
    your own."""
    files: tuple[str, ...] = ()
    """Python files that register agents, tools or tool-call formats of your own. Relative paths start at the
    current directory."""
    loops: str = ""
    """YAML list of agent loops: name, _target_ (a class by its dotted path) and further constructor arguments."""
    tools: str = ""
    """YAML file with tool classes, their settings and schemas."""
    function_tools: str = ""
    """Python file with functions marked @function_tool."""
    tool_format: str = "auto"
    """How the model writes tool calls; auto: as its chat template writes them."""
    max_assistant_turns: int | None = None
    """Most answers of the model in one episode; null: as many as fit, in at most 256 training sequences."""
    max_user_turns: int | None = None
    """Most replies to the model, of tools or of a user; null: as many as fit."""
    max_parallel_calls: int = 1
    """Tool calls of one answer that are carried out; the others are answered with a sentence that says so."""
    max_tool_response_tokens: int = 256
    """Tokens of one tool result; longer ones are cut."""
    tool_response_truncation: Literal["left", "right", "middle"] = "middle"
    """Where a long tool result is cut: left keeps its end, right its beginning, middle both."""
    timeout_s: float = 3600.0
    """Wall-clock limit of one episode, in seconds. The built-in agents with turns end with what they have then; an
    agent of your own fails."""
    tool_timeout_s: float = 60.0
    """Wall-clock limit of one call of a tool, an interaction or an environment, in seconds."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """What env_agent plays."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """How the rewards of single answers of env_agent are trained. trajectory: an episode is one sample, each reward on
    the last token of its answer. turn: every answer is a sample of its own, worth the rewards from it on, without
    discount, and estimators that compare the samples of a prompt compare all answers of all its episodes."""
    interactions: str = ""
    """YAML file with interactions: users that answer the model in episodes of interaction_agent."""

    def __post_init__(self) -> None:
        for key in (
            "max_assistant_turns",
            "max_user_turns",
            "max_parallel_calls",
            "max_tool_response_tokens",
        ):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"agent.{key} is {value}; use at least 1")
        for key in ("timeout_s", "tool_timeout_s"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"agent.{key} is {value}; use a number of seconds above 0")
        if self.tool_response_truncation not in ("left", "right", "middle"):
            raise ValueError(
                f"agent.tool_response_truncation is {self.tool_response_truncation!r}; use left, right or middle"
            )
        if self.credit not in ("trajectory", "turn"):
            raise ValueError(f"agent.credit is {self.credit!r}; use trajectory or turn")
        self._check_uses()

    def _check_uses(self) -> None:
        """Refuse settings that nothing can read."""
        if self.default_agent == TOOL_AGENT and not self.has_tools:
            raise ValueError(
                "agent.default_agent is tool_agent, but there are no tools: name some with agent.tools, "
                "agent.function_tools or agent.files"
            )
        if self.default_agent == INTERACTION_AGENT and not self.interactions:
            raise ValueError(
                "agent.default_agent is interaction_agent, but there are no interactions: name their file with "
                "agent.interactions"
            )
        if self.credit == "turn" and not (self.default_agent == ENV_AGENT or self.environment.name):
            raise ValueError(
                "agent.credit is turn, but no environment is played, and other agents give no reward per answer: set "
                "agent.default_agent=env_agent or agent.environment.name, or remove it"
            )
        if not (self.has_tools or self.loops):
            for setting in dataclasses.fields(self):
                value = getattr(self, setting.name)
                if setting.name in _OF_TOOLS and value != setting.default:
                    raise ValueError(
                        f"agent.{setting.name} is {value}, but the run has no tools, so nothing has a use for it: "
                        f"name some (agent.tools, agent.function_tools, agent.files), or remove it"
                    )
        plays_more = (
            self.environment.name or self.interactions or self.default_agent not in (SINGLE_TURN, TOOL_AGENT)
        )
        if self.has_tools or self.loops or plays_more:
            return
        for setting in dataclasses.fields(self):
            if setting.name in _OF_EVERY_AGENT or getattr(self, setting.name) == setting.default:
                continue
            raise ValueError(
                f"agent.{setting.name} is {getattr(self, setting.name)}, but single_turn_agent, the only one of this "
                f"run, has no use for it: name tools (agent.tools, agent.function_tools) or agents "
                f"(agent.files, agent.loops), or remove it"
            )

    def with_absolute_paths(self) -> AgentConfig:
        """For processes that may have another current directory."""

        def absolute(path: str) -> str:
            return str(Path(path).expanduser().absolute()) if path else ""

        return dataclasses.replace(
            self,
            files=tuple(absolute(path) for path in self.files),
            loops=absolute(self.loops),
            tools=absolute(self.tools),
            function_tools=absolute(self.function_tools),
            interactions=absolute(self.interactions),
            environment=dataclasses.replace(self.environment, name=_absolute_name(self.environment.name)),
        )

    @property
    def has_tools(self) -> bool:
        """Tools can come from somewhere."""
        return bool(self.tools or self.function_tools or self.files)


_OF_TOOLS = ("tool_format", "max_parallel_calls", "max_tool_response_tokens", "tool_response_truncation")
"""Settings that only an agent with tools reads."""
_OF_EVERY_AGENT = {"default_agent", "timeout_s", "environment"}
"""Settings that also a single turn reads; an environment without a name has none of its own."""


def _absolute_name(name: str) -> str:
    """FILE.py:CLASS with the whole path of the file; other names as they are."""
    file, colon, class_name = name.rpartition(":")
    return f"{Path(file).expanduser().absolute()}:{class_name}" if colon and file.endswith(".py") else name
