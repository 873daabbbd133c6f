"""Agents: episodes between a prompt and its final answer.

builtin.py          Built-in agents and plugins, by name
config.py           Configuration of agents
context.py          Context of an agent: chat template, limits, resources of plugins
episodes.py         One episode
episode_routing.py  Experts that the tokens of an episode went to (rollout.router_replay)
plugins.py          Base class of plugins: tools, environments and the like, given to agents
openrlhf_agents.py  Agents of OpenRLHF
registry.py         Registry of agents
setup.py            Agents of a run: files, names, context of each episode
spans.py            Timed spans of an episode
user_code.py        Errors of user code on the event loop
envs/               Environments
interactions/       Interactions
openai_server/      The gateway
tools/              Tools
verl_loops/         Agent loops in verl's form
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.agents.builtin import agents, register
    from strop.agents.config import AgentConfig
    from strop.agents.context import AgentContext, Generate
    from strop.agents.envs import Environment, Observation, Step, register_environment
    from strop.agents.interactions import BaseInteraction
    from strop.agents.openrlhf_agents import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor
    from strop.agents.setup import AgentSetup
    from strop.agents.tools import (
        BaseTool,
        OpenAIFunctionToolSchema,
        ToolResponse,
        ToolUnavailable,
        function_tool,
    )
    from strop.agents.tools.formats import ToolParser
    from strop.agents.tools.parsed_output import FunctionCall
    from strop.agents.verl_loops.base import AgentLoopBase
    from strop.agents.verl_loops.output import AgentLoopMetrics, AgentLoopOutput
    from strop.agents.verl_loops.server import simple_timer
    from strop.agents.verl_loops.tools import initialize_tools_from_config

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
        ".builtin": "agents register",
        ".setup": "AgentSetup",
        "strop.agents.openrlhf_agents": "AgentExecutorBase AgentInstanceBase MultiTurnAgentExecutor",
        "strop.agents.verl_loops.base": "AgentLoopBase",
        "strop.agents.verl_loops.output": "AgentLoopMetrics AgentLoopOutput",
        "strop.agents.verl_loops.server": "simple_timer",
        "strop.agents.verl_loops.tools": "initialize_tools_from_config",
        "strop.agents.envs": "Environment Observation Step register_environment",
        "strop.agents.interactions": "BaseInteraction",
        "strop.agents.tools": "BaseTool OpenAIFunctionToolSchema ToolResponse ToolUnavailable function_tool",
        "strop.agents.tools.parsed_output": "FunctionCall",
        "strop.agents.tools.formats": "ToolParser",
    },
)
