"""Settings of tools, among those of agents."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from strop.base.field_types import PositiveInt

TOOL_AGENT = "tool_agent"
"""Name of the agent that alternates answers and calls of tools."""


@dataclass(frozen=True, kw_only=True)
class ToolSettings:
    tools: str = ""
    """YAML file with tool classes, their settings and schemas."""
    function_tools: str = ""
    """Python file with functions marked @function_tool."""
    tool_format: str = "auto"
    """How the model writes tool calls, also to an agent behind the gateway and in `strop serve`; auto: as its chat
    template writes them."""
    max_parallel_calls: PositiveInt = 1
    """Tool calls of one answer that are carried out; the others are answered with a sentence that says so."""
    max_tool_response_tokens: PositiveInt = 256
    """Tokens of one tool result; longer ones are cut."""
    tool_response_truncation: Literal["left", "right", "middle"] = "middle"
    """Where a long tool result is cut: left keeps its end, right its beginning, middle both."""

    def __post_init__(self) -> None:
        agent: Any = self
        has_tools = bool(self.tools or self.function_tools or agent.files)
        if agent.default_agent == TOOL_AGENT and not has_tools:
            raise ValueError(
                "agent.default_agent is tool_agent, but there are no tools: name some with agent.tools, "
                "agent.function_tools or agent.files"
            )
        if has_tools or bool(getattr(agent, "loops", "")):  # loops of a user's own may read them as well
            return
        for setting in dataclasses.fields(ToolSettings):
            value = getattr(self, setting.name)
            if value != setting.default and setting.name != "tool_format":  # the gateway reads it as well
                raise ValueError(
                    f"agent.{setting.name} is {value}, but the run has no tools, so nothing has a use for it: "
                    f"name some (agent.tools, agent.function_tools, agent.files), or remove it"
                )
