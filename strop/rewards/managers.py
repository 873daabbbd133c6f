"""Public import path of `RewardManagerBase` and `register` for reward files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.rewards.verl_managers import RewardManagerBase, register

__all__ = [
    "RewardManagerBase",
    "register",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "strop.rewards.verl_managers": "RewardManagerBase register",
    },
)
