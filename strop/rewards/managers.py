"""Where reward files import `RewardManagerBase` and `register` from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from strop.compat.reward_managers import RewardManagerBase, register

__all__ = [
    "RewardManagerBase",
    "register",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "strop.compat.reward_managers": "RewardManagerBase register",
    },
)
