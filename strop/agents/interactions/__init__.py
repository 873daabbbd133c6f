"""Interactions: users that answer the model.

base.py     BaseInteraction
loading.py  interactions of a run, from a YAML file
gsm8k.py    a teacher who says whether the answer is right

The agent that talks with them is interaction_agent.py, beside this folder.
"""

from __future__ import annotations

from strop.agents.interactions.base import BaseInteraction
from strop.agents.interactions.loading import interaction_of_row, load_interactions

__all__ = ["BaseInteraction", "interaction_of_row", "load_interactions"]
