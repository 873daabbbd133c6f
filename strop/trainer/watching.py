"""A long generation shows how far it is.

Concurrency: while samples are played, a thread of its own reads what the rollout workers have noted and shows it; it
has ended when the call returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
        clear(self._logs)
        is_over = threading.Event()

        def look(logs: Path, show: Callable[[str], None]) -> None:
            while not is_over.wait(PERIOD_S):
                ended, scored = ended_and_scored(logs)
                show(f"{ended} of {num_samples} episodes done, {scored} scored")

        thread = threading.Thread(target=look, args=(self._logs, self.show), name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
