"""Where reward files import `bounded` from, a comparison with a limit on its computing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from strop.scorers.budget import bounded

__all__ = [
    "bounded",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "strop.scorers.budget": "bounded",
    },
)
