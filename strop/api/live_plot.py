"""A picture of a run that grows in a notebook while it trains."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.observability.reward_curve import figure_of, run_series

EVERY_S = 2.0
"""Between two pictures."""


def in_notebook() -> bool:
    """This process shows pictures: a kernel of Jupyter or the like."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


class Picture:
    """Draws rewards and pass rates as steps end."""

    def __init__(self, folder: Path) -> None:
        from IPython.display import display  # there is one: the caller is a notebook

        self._folder, self._metrics, self._drawn_s = folder, list[Mapping[str, float]](), 0.0
        self._shown: Any = display(f"{folder}: the first step", display_id=True)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """One more step."""
        self._metrics.append({"step": step, **metrics})
        if time.monotonic() - self._drawn_s >= EVERY_S:
            self.draw()

    def draw(self) -> None:
        """Show what there is."""
        self._drawn_s = time.monotonic()
        if self._metrics:
            self._shown.update(figure_of(run_series(self._metrics), title=self._folder.name))
