"""Interactions: users that answer the model.

base.py     BaseInteraction
loading.py  interactions of a run, from a YAML file
gsm8k.py    a teacher who says whether the answer is right
agent.py    the agent that talks with them
plugin.py   interactions of a run, given to episodes; settings.py: agent.interactions
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.agents.interactions.base import BaseInteraction
    from strop.agents.interactions.loading import interaction_of_row, load_interactions

__all__ = [
    "BaseInteraction",
    "interaction_of_row",
    "load_interactions",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".base": "BaseInteraction",
        ".loading": "interaction_of_row load_interactions",
    },
)
