"""Progress of a rollout call: workers write the number of ended samples into the run's logs, and it is shown.

A call of a worker says nothing before its end, whatever runtime carries it; a file can be read meanwhile.

Concurrency: while samples are played, a thread of the controller reads the files from time to time; it has ended when
the call returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from strop.utils.background import every
from strop.workers.episodes import Episode

SUFFIX = ".progress"
PERIOD_S = 10.0
"""Seconds between two looks."""


class Tally:
    """Counts for one rollout worker; without a folder, nowhere. A disk that refuses costs the count, not the run."""

    def __init__(self, logs: Path | None, *, rank: int) -> None:
        self._file = None if logs is None else logs / f"rollout-{rank:05d}{SUFFIX}"
        self._ended = self._scored = 0

    def reset(self) -> None:
        """Reset the count at the start of a call."""
        self._ended = self._scored = 0
        self._write()

    def add(self, episode: Episode) -> None:
        """Count an episode that has ended."""
        self._ended += 1
        self._scored += episode.outcome is not None
        self._write()

    def _write(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                written = self._file.with_suffix(".writing")  # a reader finds this count or the one before
                written.write_text(f"{self._ended} {self._scored}\n")
                written.replace(self._file)


def ended_and_scored(logs: Path) -> tuple[int, int]:
    """Samples of the present call that have ended and that were scored, over all workers."""
    ended = scored = 0
    for file in logs.glob(f"rollout-*{SUFFIX}"):
        with contextlib.suppress(OSError, ValueError):
            first, second = file.read_text().split()
            ended, scored = ended + int(first), scored + int(second)
    return ended, scored


class RolloutProgress:
    """Shows the progress of a rollout call from time to time."""

    def __init__(self, logs: Path | None) -> None:
        """`logs` is the folder in which the workers note them; None: nothing is shown."""
        self._logs = logs
        self.show: Callable[[str], None] | None = None
        """Takes a sentence; None until there is a display."""

    @contextlib.contextmanager
    def watch(self, num_samples: int) -> Iterator[None]:
        """Show the progress while so many samples are played and scored."""
        if self._logs is None or self.show is None:
            yield
            return
        logs, show = self._logs, self.show
        for file in logs.glob(f"rollout-*{SUFFIX}"):  # of the call before
            with contextlib.suppress(OSError):
                file.unlink()

        def look() -> None:
            ended, scored = ended_and_scored(logs)
            show(f"{ended} of {num_samples} episodes done, {scored} scored")

        with every(PERIOD_S, look, name="progress"):
            yield
