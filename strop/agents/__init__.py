"""Agents: what happens between a prompt and its final answer.

registry.py      agents by name, and the decorator that registers one
context.py       what an agent may use: generate, tools, chat template, limits
single_turn.py   one generation, no tools
turns.py         what agents with replies share: answer and reply, until one of them ends it
loops.py         agent loops in verl's form, through one adapter (loop_inputs.py, loop_output.py)
conversation.py  the token record of several turns
templates.py     which tokens a chat template puts between them, by its template_profile.py
setup.py         everything a run names, loaded and checked; rows.py: rows with their agent and tools
episodes.py      plays an agent for one sample: its random stream, its token budget, its deadline
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from strop.agents.config import AgentConfig
    from strop.agents.context import AgentContext, Generate
    from strop.agents.loop_output import AgentLoopMetrics, AgentLoopOutput
    from strop.agents.loops import AgentLoopBase
    from strop.agents.registry import agents, register
    from strop.agents.setup import AgentSetup

__all__ = [
    "AgentConfig",
    "AgentContext",
    "AgentLoopBase",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentSetup",
    "Generate",
    "agents",
    "register",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".config": "AgentConfig",
        ".context": "AgentContext Generate",
        ".loop_output": "AgentLoopMetrics AgentLoopOutput",
        ".loops": "AgentLoopBase",
        ".registry": "agents register",
        ".setup": "AgentSetup",
    },
)
