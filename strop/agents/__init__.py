"""Agents: what happens between a prompt and its final answer.

registry.py      agents by name, the decorator that registers one, and the simplest agent: one answer, no tools
context.py       what an agent may use: generate, chat template, limits, and what guests bring (kits.py)
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

__all__ = [
    "AgentConfig",
    "AgentContext",
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
        ".registry": "agents register",
        ".setup": "AgentSetup",
    },
)
