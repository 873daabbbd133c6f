"""Agents: what happens between a prompt and its final answer.

registry.py      agents by name, the decorator that registers one, and the simplest agent: one answer, no tools
context.py       what an agent may use: generate, chat template, limits, and what it is given (kits.py)
setup.py         everything a run names, loaded and checked; rows with their agent and schemas
episodes.py      plays an agent for one sample: its random stream, its token budget, its deadline
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from strop.agents.config import AgentConfig
    from strop.agents.context import AgentContext, Generate
    from strop.agents.registry import agents, register
    from strop.agents.setup import AgentSetup
    from strop.compat.agent_instances import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor
    from strop.compat.agent_loops.base import AgentLoopBase
    from strop.compat.agent_loops.output import AgentLoopMetrics, AgentLoopOutput
    from strop.compat.agent_loops.server import simple_timer
    from strop.environments import Environment, Observation, Step, register_environment
    from strop.interactions import BaseInteraction
    from strop.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse, ToolUnavailable, function_tool
    from strop.tools.answers import FunctionCall
    from strop.tools.formats import ToolParser
    from strop.tools.loading import initialize_tools_from_config

__all__ = [
    "AgentConfig",
    "AgentContext",
    "AgentExecutorBase",
    "AgentInstanceBase",
    "AgentLoopBase",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentSetup",
    "BaseInteraction",
    "BaseTool",
    "Environment",
    "FunctionCall",
    "Generate",
    "MultiTurnAgentExecutor",
    "Observation",
    "OpenAIFunctionToolSchema",
    "Step",
    "ToolParser",
    "ToolResponse",
    "ToolUnavailable",
    "agents",
    "function_tool",
    "initialize_tools_from_config",
    "register",
    "register_environment",
    "simple_timer",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".config": "AgentConfig",
        ".context": "AgentContext Generate",
        ".registry": "agents register",
        ".setup": "AgentSetup",
        "strop.compat.agent_instances": "AgentExecutorBase AgentInstanceBase MultiTurnAgentExecutor",
        "strop.compat.agent_loops.base": "AgentLoopBase",
        "strop.compat.agent_loops.output": "AgentLoopMetrics AgentLoopOutput",
        "strop.compat.agent_loops.server": "simple_timer",
        "strop.environments": "Environment Observation Step register_environment",
        "strop.interactions": "BaseInteraction",
        "strop.tools": "BaseTool OpenAIFunctionToolSchema ToolResponse ToolUnavailable function_tool",
        "strop.tools.answers": "FunctionCall",
        "strop.tools.loading": "initialize_tools_from_config",
        "strop.tools.formats": "ToolParser",
    },
)
