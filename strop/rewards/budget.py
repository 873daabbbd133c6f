"""Public import path of `bounded` for reward files: a comparison with a compute budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.rewards.scorers.budget import bounded

__all__ = [
    "bounded",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "strop.rewards.scorers.budget": "bounded",
    },
)
