"""Agents: what happens between a prompt and its final answer.

registry.py     the Agent type and the registry of agents by name
single_turn.py  one generation, no tools
episodes.py     plays an agent for one sample: its random stream, its token budget
"""

from __future__ import annotations

from strop.agents import single_turn

__all__ = ["single_turn"]  # imported so that its agent is registered
