"""What a check found, and how much it matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    text: str
    """What was found."""
    level: Literal["ok", "warn", "stop"] = "ok"
    """`warn`: a run may learn all the same. `stop`: it cannot, and is not started."""
    advice: str = ""
    """What to do; empty where it is fine."""

    @property
    def is_fine(self) -> bool:
        """There is nothing to do."""
        return self.level == "ok"
