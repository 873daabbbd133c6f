"""A long generation shows how far it is.

Concurrency: while samples are played, a thread of its own reads what the rollout workers have noted and shows it; it
has ended when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from strop.base.background import every
from strop.workers.tally import clear, ended_and_scored

PERIOD_S = 10.0
"""Seconds between two looks."""


class PlayWatch:
    """Looks at the samples that are being played, from time to time."""

    def __init__(self, logs: Path | None) -> None:
        """`logs` is the folder in which the workers note them; None: nothing is shown."""
        self._logs = logs
        self.show: Callable[[str], None] | None = None
        """Takes a sentence, once there is somebody to show it to."""

    @contextmanager
    def playing(self, num_samples: int) -> Iterator[None]:
        """While so many samples are played and scored."""
        if self._logs is None or self.show is None:
            yield
            return
        logs, show = self._logs, self.show
        clear(logs)

        def look() -> None:
            ended, scored = ended_and_scored(logs)
            show(f"{ended} of {num_samples} episodes done, {scored} scored")

        with every(PERIOD_S, look, name="progress"):
            yield
