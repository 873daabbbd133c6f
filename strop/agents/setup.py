"""The agents and tools of a run: files loaded, names checked, and what each episode gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from strop.agents import single_turn
from strop.agents.config import BUILT_IN, ENV_AGENT, INTERACTION_AGENT, SINGLE_TURN, TOOL_AGENT, AgentConfig
from strop.agents.context import AgentContext
from strop.agents.images import ImageEncoder
from strop.agents.loops import loops_from_yaml
from strop.agents.registry import agents
from strop.agents.templates import ChatTemplate
from strop.base.user_files import load_user_file
from strop.environments import agent as env_agent
from strop.environments.loading import choose_environment, find_environment
from strop.interactions import agent as interaction_agent
from strop.interactions.loading import interaction_of_row, load_interactions
from strop.rollout.types import Sampling
from strop.tools import agent as tool_agent
from strop.tools.base import BaseTool
from strop.tools.formats import ToolParser, parser_for_template
from strop.tools.functions import FUNCTION_TOOL_REGISTRY
from strop.tools.loading import add_tool, load_all_tools
from strop.tools.mcp import McpTool
from strop.trajectory import Prompt

__all__ = ["AgentSetup", "env_agent", "interaction_agent", "load_agents", "single_turn", "tool_agent"]

logger = logging.getLogger(__name__)

_TOOL_KEYS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")


def load_agents(config: AgentConfig) -> None:
    """Import the user's files and register the loops of the YAML list, once per process.

    Raises:
        ValueError: a file cannot be imported, or the default agent is not known.
    """
    for name in config.files:
        load_user_file(name, setting="agent.files")
    if config.loops:
        for name, agent in loops_from_yaml(config.loops).items():
            if name in BUILT_IN:
                raise ValueError(f"agent.loops names a loop {name!r}, which is built in; choose another name")
            agents[name] = agent
    if config.default_agent not in agents:
        raise ValueError(
            f"agent.default_agent is {config.default_agent!r}, but no agent has that name; known: "
            f"{', '.join(sorted(agents))}"
        )


class AgentSetup:
    """Made once per process that plays episodes or shows prompts."""

    def __init__(
        self,
        config: AgentConfig,
        tokenizer: Any,
        *,
        template_options: Mapping[str, Any] | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        """Load everything that the configuration names.

        Args:
            config: which agents and tools there are.
            tokenizer: with the chat template.
            template_options: variables of the template.
            images: reads images of tools; None where the model takes text alone, or nothing is played.

        Raises:
            ValueError: the sentence says which file, tool or format cannot be used.
        """
        self.config = config
        self._tokenizer = tokenizer
        self._options = dict(template_options or {})
        self._images = images
        self._templates: dict[bool | None, ChatTemplate] = {}
        self._parser: ToolParser | None = None
        load_agents(config)
        self.tools: dict[str, BaseTool] = load_all_tools(config.tools, config.function_tools)
        """Every tool, by name."""
        self.interactions = load_interactions(config.interactions) if config.interactions else {}
        """Every interaction, by name."""
        if config.environment.name:
            find_environment(config.environment.name)
        files = {load_user_file(name, setting="agent.files").__name__ for name in config.files}
        for function in FUNCTION_TOOL_REGISTRY.values():  # of agent.files; those of function_tools are there
            if function.function.__module__ in files and function.name not in self.tools:
                add_tool(self.tools, function)
        if config.default_agent == TOOL_AGENT and not self.tools:
            raise ValueError(
                "agent.default_agent is tool_agent, but no tool was found: name a YAML file with agent.tools, or mark "
                "functions with @function_tool"
            )
        for tool in self.tools.values():
            if isinstance(tool, McpTool):  # others are the user's own
                tool.tool_schema = self.template().as_plain_schema(tool.tool_schema)
        if self.tools:
            self._parser = self._find_parser()

    def template(self, thinking: bool | None = None) -> ChatTemplate:
        """The chat template, with the row's choice of thinking."""
        if thinking not in self._templates:
            options = self._options if thinking is None else {**self._options, "enable_thinking": thinking}
            self._templates[thinking] = ChatTemplate(self._tokenizer, options)
        return self._templates[thinking]

    def agent_of(self, row: Mapping[str, Any]) -> str:
        """Name of the agent that plays a row."""
        return str(row.get("agent_name") or self.config.default_agent)

    def tools_of(self, row: Mapping[str, Any], agent_name: str) -> dict[str, BaseTool]:
        """Tools that a row may use: those of `extra_info.tool_selection`, or all; none for a single turn and for an
        environment."""
        if agent_name in (SINGLE_TURN, ENV_AGENT):
            return {}
        selection = _extra(row).get("tool_selection")
        if selection is None:
            return self.tools
        return {name: self.tools[name] for name in selection}

    def schemas_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """Tool schemas that the prompt of a row shows; None for none."""
        tools = self.tools_of(row, self.agent_of(row))
        return [tool.tool_schema.model_dump() for tool in tools.values()] or None

    def check_row(self, row: Mapping[str, Any], where: str) -> None:
        """Refuse a row that names what there is not.

        Raises:
            ValueError: an unknown agent or tool, or tool settings that are missing or malformed.
        """
        name = self.agent_of(row)
        if name not in agents:
            raise ValueError(
                f"{where} has agent_name {name!r}, but no agent has that name; known: {', '.join(sorted(agents))}"
            )
        if name == TOOL_AGENT and not self.tools:
            raise ValueError(
                f"{where} is for tool_agent, but the run has no tools: name some with agent.tools or "
                f"agent.function_tools"
            )
        extra = _extra(row)
        if name == ENV_AGENT:
            chosen = self.config.environment
            choice = choose_environment(row, name=chosen.name, kwargs=chosen.kwargs, where=where)
            find_environment(choice.name, is_of_row=choice.is_of_row)
        if name == INTERACTION_AGENT:
            interaction_of_row(extra, self.interactions, where)
        selection = extra.get("tool_selection")
        kwargs = tools_kwargs_of(row)
        known = ", ".join(sorted(self.tools)) or "none"
        for tool in [*(selection if selection is not None else ()), *kwargs]:
            if name != SINGLE_TURN and tool not in self.tools:
                raise ValueError(
                    f"{where} names the tool {tool!r}, but the run has no such tool; it has {known}"
                )
        for tool, given in kwargs.items():
            if not isinstance(given, Mapping) or (unknown := set(given) - set(_TOOL_KEYS)):
                wrong = f"the key {sorted(unknown)[0]!r}" if isinstance(given, Mapping) else f"{given!r:.60}"
                raise ValueError(
                    f"{where}: tools_kwargs of {tool!r} have {wrong}; they have {', '.join(_TOOL_KEYS)}"
                )
            for taken in {"instance_id", "parameters", "agent_data"} & set(given.get("execute_kwargs") or ()):
                raise ValueError(
                    f"{where}: execute_kwargs of {tool!r} have {taken!r}, which strop itself gives a tool"
                )
        if name != SINGLE_TURN and extra.get("need_tools_kwargs") and not kwargs:
            raise ValueError(f"{where} has need_tools_kwargs, but no tools_kwargs; give them in extra_info")
        if row.get("tools") and self.tools_of(row, name):
            raise ValueError(
                f"{where} has a column 'tools' with schemas, but {name} shows those of its own tools; remove the "
                f"column, or choose tools with extra_info.tool_selection"
            )

    def context(
        self,
        prompt: Prompt,
        sampling: Sampling,
        *,
        deadline: float,
        keep_deadline: Callable[[], None] = lambda: None,
    ) -> AgentContext:
        """What the agent of one episode gets."""
        row = {**prompt.columns, "extra_info": prompt.extra_info}
        tools = self.tools_of(row, prompt.agent_name)
        thinking = prompt.columns.get("enable_thinking")
        return AgentContext(
            config=self.config,
            tokenizer=self._tokenizer,
            template=self.template(thinking if isinstance(thinking, bool) else None),
            parser=self._parser if tools else None,
            tools=tools,
            tool_schemas=tuple(tool.tool_schema.model_dump() for tool in tools.values()),
            tools_kwargs=tools_kwargs_of(row),
            sampling=sampling,
            deadline=deadline,
            keep_deadline=keep_deadline,
            interactions=self.interactions,
            images=self._images,
        )

    def _find_parser(self) -> ToolParser:
        profile = self.template().profile
        if not profile.shows_tools:
            logger.warning(
                "the chat template does not show tool schemas to the model; describe the tools in the system message"
            )
        if self.config.tool_format == "auto":
            return parser_for_template(profile.call_example, self._tokenizer)
        return ToolParser.get_tool_parser(self.config.tool_format, self._tokenizer)


def tools_kwargs_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Per tool, what the row gives it: column or extra_info key tools_kwargs, empty entries left out."""
    given = row.get("tools_kwargs") or _extra(row).get("tools_kwargs") or {}
    return {name: value for name, value in given.items() if value is not None}


def _extra(row: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = row.get("extra_info")
    return extra if isinstance(extra, Mapping) else {}
