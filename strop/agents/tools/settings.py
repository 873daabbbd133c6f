"""Settings of tools, among those of agents."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from strop.utils.setting_text import setting_text

if TYPE_CHECKING:
    from strop.agents.config import AgentConfig

TOOL_AGENT = "tool_agent"
"""Name of the agent that alternates answers and calls of tools."""
OF_TOOLS = (
    "tools",
    "function_tools",
    "max_parallel_calls",
    "max_tool_response_tokens",
    "tool_response_truncation",
)
"""Settings that nothing reads without tools; the gateway reads tool_format as well."""


def check_tools(config: AgentConfig) -> None:
    """Refuse an agent with tools where there are none, and settings of tools that nothing reads, as a ValueError."""
    has_tools = bool(config.tools or config.function_tools or config.files)
    if config.default_agent == TOOL_AGENT and not has_tools:
        raise ValueError(
            "agent.default_agent is tool_agent, but there are no tools: name some with agent.tools, "
            "agent.function_tools or agent.files"
        )
    if has_tools or bool(config.loops):  # loops of a user's own may read them as well
        return
    for setting in dataclasses.fields(config):
        value = getattr(config, setting.name)
        if setting.name in OF_TOOLS and value != setting.default:
            raise ValueError(
                f"agent.{setting.name} is {setting_text(value)}, but the run has no tools, so nothing has a use for "
                f"it: name some (agent.tools, agent.function_tools, agent.files), or remove it"
            )
