"""Findings of a check, and how much they matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    text: str
    """The finding in words."""
    level: Literal["ok", "warn", "stop"] = "ok"
    """`warn`: a run may learn all the same. `stop`: it cannot, and is not started."""
    advice: str = ""
    """Advice; empty where all is fine."""

    @property
    def is_fine(self) -> bool:
        """There is nothing to do."""
        return self.level == "ok"
