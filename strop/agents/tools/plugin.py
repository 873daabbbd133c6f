"""Plugin of tools: loaded and checked, chosen by rows, and given to episodes."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from strop.agents.config import AGENTS_IN_A_WORLD, SINGLE_TURN, AgentConfig
from strop.agents.context import AgentContext
from strop.agents.plugins import AgentPlugin, EpisodeResources, extra_info_of
from strop.agents.tools.base import BaseTool
from strop.agents.tools.formats import ToolParser, parser_for_template
from strop.agents.tools.functions import FUNCTION_TOOL_REGISTRY
from strop.agents.tools.loading import add_tool, load_all_tools, load_tool_code
from strop.agents.tools.mcp import McpTool, close_servers
from strop.agents.tools.python_sandbox import PythonSandboxTool
from strop.agents.tools.schemas import OpenAIFunctionToolSchema
from strop.agents.tools.session import ToolLimits, ToolSession
from strop.agents.tools.settings import TOOL_AGENT
from strop.protocol.trajectory import Prompt
from strop.sandbox import Sandbox, make_sandbox
from strop.utils.user_files import load_user_file

if TYPE_CHECKING:
    from strop.agents.setup import AgentSetup
    from strop.rewards.config import RewardConfig

logger = logging.getLogger(__name__)

_BEHIND_THE_GATEWAY = "openai_agent"
"""Agent whose client brings the tools."""
_TOOL_KEYS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")


class ToolPlugin(AgentPlugin):
    """Gives an episode the tools that its row may use, by name."""

    def __init__(self, setup: AgentSetup) -> None:
        """Load tools, and find the format of their calls.

        Raises:
            ValueError: the sentence says which file, tool or format cannot be used.
        """
        self._setup = setup
        self._settings = setup.config
        self.tools: dict[str, BaseTool] = load_all_tools(self._settings.tools, self._settings.function_tools)
        """Every tool, by name."""
        files = {load_user_file(name, setting="agent.files").__name__ for name in setup.config.files}
        for function in FUNCTION_TOOL_REGISTRY.values():  # of agent.files; those of function_tools are there
            if function.function.__module__ in files and function.name not in self.tools:
                add_tool(self.tools, function)
        if setup.config.default_agent == TOOL_AGENT and not self.tools:
            raise ValueError(
                "agent.default_agent is tool_agent, but no tool was found: name a YAML file with agent.tools, or mark "
                "functions with @function_tool"
            )
        for tool in self.tools.values():
            if isinstance(tool, McpTool):  # others are the user's own
                tool.tool_schema = self._as_plain(tool.tool_schema)
        self.parser = self.find_parser() if self.tools else None
        self._sandbox: Sandbox | None = None

    @classmethod
    def load(cls, config: AgentConfig) -> None:
        """Import classes and functions of tools; servers of tools are not asked yet.

        Raises:
            ValueError: the sentence says which file or entry cannot be used.
        """
        load_tool_code(config.tools, config.function_tools)

    def _as_plain(self, schema: OpenAIFunctionToolSchema) -> OpenAIFunctionToolSchema:
        """The schema of a server's tool, whose texts and names make no control tokens in a prompt."""
        text = json.dumps(schema.model_dump(), ensure_ascii=False)
        return OpenAIFunctionToolSchema.model_validate(json.loads(self._setup.template().as_plain_text(text)))

    def find_parser(self) -> ToolParser:
        """The parser of agent.tool_format, or of the chat template."""
        profile = self._setup.template().profile
        if not profile.shows_tools:
            logger.warning(
                "the chat template does not show tool schemas to the model; describe the tools in the system message"
            )
        if self._settings.tool_format == "auto":
            return parser_for_template(profile.call_example, self._setup.tokenizer)
        return ToolParser.get_tool_parser(self._settings.tool_format, self._setup.tokenizer)

    def for_episode(self, row: Mapping[str, Any], agent: str) -> EpisodeResources:
        """Tools that a row may use: those of `extra_info.tool_selection`, or all; none for a single turn and in a
        world."""
        tools: dict[str, BaseTool] = {}
        if agent != SINGLE_TURN and agent not in AGENTS_IN_A_WORLD:
            selection = extra_info_of(row).get("tool_selection")
            tools = self.tools if selection is None else {name: self.tools[name] for name in selection}
        return EpisodeResources(
            content=tools,
            schemas=tuple(tool.tool_schema.model_dump() for tool in tools.values()),
            parser=self.parser if tools else None,
        )

    def check_agents(self, agents: Collection[str], split: str) -> None:
        """Refuse tools, and a format of their calls, that no agent of a split uses."""
        agents_without_tools = {SINGLE_TURN}
        self._check_format(agents, split)
        if split == "train":  # validation may leave tools alone
            agents_without_tools |= AGENTS_IN_A_WORLD
        if self.tools and agents_without_tools.issuperset(agents):
            raise ValueError(
                f"the run has tools ({', '.join(sorted(self.tools))}), but every {split} row is played by "
                f"{' or '.join(sorted(agents))}, which uses none: set agent.default_agent=tool_agent, give rows an "
                f"agent_name, or remove the tools"
            )

    def _check_format(self, agents: Collection[str], split: str) -> None:
        tool_format, config = self._settings.tool_format, self._setup.config
        has_code = bool(self.tools) or bool(config.files) or bool(config.loops)
        if split == "train" and tool_format != "auto" and not has_code and _BEHIND_THE_GATEWAY not in agents:
            raise ValueError(
                f"agent.tool_format is {tool_format}, but the run has no tools, so nothing has a use for it: name some "
                f"(agent.tools, agent.function_tools, agent.files), or remove it"
            )

    def check_row(self, row: Mapping[str, Any], agent: str, label: str) -> None:
        """Refuse a row with an unknown tool, or settings of tools that are missing or malformed."""
        if agent == TOOL_AGENT and not self.tools:
            raise ValueError(
                f"{label} is for tool_agent, but the run has no tools: name some with agent.tools or "
                f"agent.function_tools"
            )
        extra, kwargs = extra_info_of(row), tools_kwargs_of(row)
        selection = extra.get("tool_selection")
        names = ", ".join(sorted(self.tools)) or "none"
        for tool in [*(selection if selection is not None else ()), *kwargs]:
            if agent != SINGLE_TURN and tool not in self.tools:
                raise ValueError(
                    f"{label} names the tool {tool!r}, but the run has no such tool; it has {names}"
                )
        _check_kwargs(kwargs, label)
        if agent != SINGLE_TURN and extra.get("need_tools_kwargs") and not kwargs:
            raise ValueError(f"{label} has need_tools_kwargs, but no tools_kwargs; give them in extra_info")
        if row.get("tools") and self.for_episode(row, agent).schemas:
            raise ValueError(
                f"{label} has a column 'tools' with schemas, but {agent} shows those of its own tools; remove the "
                f"column, or choose tools with extra_info.tool_selection"
            )

    def start(self, reward: RewardConfig) -> None:
        """Start the sandbox where a tool runs programs, so that a run without isolation does not begin.

        Raises:
            SandboxUnavailable: programs cannot be isolated here.
        """
        runners = [tool for tool in self.tools.values() if isinstance(tool, PythonSandboxTool)]
        if runners:
            self._sandbox = make_sandbox(reward.sandbox)
            self._sandbox.start()
        for tool in runners:
            tool.sandbox = self._sandbox

    def close(self) -> None:
        """End the sandbox, and the servers of this process."""
        for tool in self.tools.values():
            if isinstance(tool, PythonSandboxTool):
                tool.sandbox = None
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None
        close_servers()


def _check_kwargs(kwargs: Mapping[str, Any], label: str) -> None:
    """Refuse settings for tools that are not in the form of `tools_kwargs`."""
    for tool, tool_kwargs in kwargs.items():
        if not isinstance(tool_kwargs, Mapping) or (unknown := set(tool_kwargs) - set(_TOOL_KEYS)):
            problem = (
                f"the key {sorted(unknown)[0]!r}"
                if isinstance(tool_kwargs, Mapping)
                else f"{tool_kwargs!r:.60}"
            )
            raise ValueError(
                f"{label}: tools_kwargs of {tool!r} have {problem}; they have {', '.join(_TOOL_KEYS)}"
            )
        for reserved in {"instance_id", "parameters", "agent_data"} & set(
            tool_kwargs.get("execute_kwargs") or ()
        ):
            raise ValueError(
                f"{label}: execute_kwargs of {tool!r} have {reserved!r}, which strop itself gives a tool"
            )


def tools_kwargs_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a row for its tools, by tool: column or extra_info key tools_kwargs. Nulls are left out, down to
    those of single arguments: a table gives every row the keys of all."""
    kwargs = row.get("tools_kwargs") or extra_info_of(row).get("tools_kwargs") or {}
    return _without_nulls(kwargs, levels=3)


def _without_nulls(values: Mapping[str, Any], *, levels: int) -> dict[str, Any]:
    return {
        name: _without_nulls(value, levels=levels - 1) if levels > 1 and isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not None
    }


def tools_of(context: AgentContext) -> Mapping[str, BaseTool]:
    """The tools of an episode, by name."""
    tools: Mapping[str, BaseTool] = context.resources["tools"]
    return tools


def tool_session(context: AgentContext, prompt: Prompt, sample_id: str) -> ToolSession:
    """The tools of an episode; use as `async with`, so that they are released whatever happens."""
    config = context.config
    return ToolSession(
        tools_of(context),
        tools_kwargs=tools_kwargs_of({**prompt.columns, "extra_info": prompt.extra_info}),
        tokenizer=context.tokenizer,
        limits=ToolLimits(
            max_parallel_calls=config.max_parallel_calls,
            max_response_tokens=config.max_tool_response_tokens,
            truncation=config.tool_response_truncation,
            timeout_s=config.tool_timeout_s,
        ),
        facts={
            "request_id": sample_id,
            "uid": prompt.uid,
            "messages": list(prompt.messages),
            "extra_info": prompt.extra_info,
            "ground_truth": prompt.ground_truth,
        },
        images=context.images,
        no_images_reason=_no_images_reason(context),
    )


def _no_images_reason(context: AgentContext) -> str:
    """Reason why the model cannot be shown images of tools; empty where it can."""
    if context.images is None:
        return "the model takes text alone"
    if not context.template.shows_images(context.images.placeholder_id):
        return "the chat template of the model writes no images into tool results"
    return ""
