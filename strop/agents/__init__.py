"""Agents: what happens between a prompt and its final answer.

registry.py      agents by name, and the decorator that registers one
context.py       what an agent may use: generate, tools, chat template, limits
single_turn.py   one generation, no tools
tool_agent.py    answers and tool calls in turns
env_agent.py     plays an environment (environments/)
interaction_agent.py  talks with a user (interactions/)
turns.py         what the last three share: answer and reply, until one of them ends it
loops.py         agent loops in verl's form, through one adapter (loop_inputs.py, loop_output.py)
conversation.py  the token record of several turns
templates.py     which tokens a chat template puts between them, by its template_profile.py
formats/         how models write tool calls
tools/           tools, and their life in an episode
setup.py         everything a run names, loaded and checked; rows.py: rows with their agent and tools
episodes.py      plays an agent for one sample: its random stream, its token budget, its deadline
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.lazy_names import lazy_names

if TYPE_CHECKING:
    from strop.agents.config import AgentConfig
    from strop.agents.context import AgentContext, Generate
    from strop.agents.environments import Environment, Observation, Step, register_environment
    from strop.agents.formats import FunctionCall, ToolParser
    from strop.agents.interactions import BaseInteraction
    from strop.agents.loop_output import AgentLoopMetrics, AgentLoopOutput
    from strop.agents.loops import AgentLoopBase
    from strop.agents.registry import agents, register
    from strop.agents.setup import AgentSetup
    from strop.agents.tools import (
        BaseTool,
        OpenAIFunctionToolSchema,
        ToolResponse,
        ToolUnavailable,
        function_tool,
    )

__all__ = [
    "AgentConfig",
    "AgentContext",
    "AgentLoopBase",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentSetup",
    "BaseInteraction",
    "BaseTool",
    "Environment",
    "FunctionCall",
    "Generate",
    "Observation",
    "OpenAIFunctionToolSchema",
    "Step",
    "ToolParser",
    "ToolResponse",
    "ToolUnavailable",
    "agents",
    "function_tool",
    "register",
    "register_environment",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".config": "AgentConfig",
        ".context": "AgentContext Generate",
        ".environments": "Environment Observation Step register_environment",
        ".formats": "FunctionCall ToolParser",
        ".interactions": "BaseInteraction",
        ".loop_output": "AgentLoopMetrics AgentLoopOutput",
        ".loops": "AgentLoopBase",
        ".registry": "agents register",
        ".setup": "AgentSetup",
        ".tools": "BaseTool OpenAIFunctionToolSchema ToolResponse ToolUnavailable function_tool",
    },
)
