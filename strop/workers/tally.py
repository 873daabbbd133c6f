"""How many samples of a call have ended, while it lasts: each rollout worker writes it into a file of the run's logs.

A call of a worker says nothing before its end, whatever runtime carries it; a file can be read meanwhile.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from strop.workers.episodes import Episode

SUFFIX = ".progress"


class Tally:
    """Counts for one rollout worker; without a folder, nowhere. A disk that refuses costs the count, not the run."""

    def __init__(self, logs: Path | None, *, rank: int) -> None:
        self._file = None if logs is None else logs / f"rollout-{rank:05d}{SUFFIX}"
        self._ended = self._scored = 0

    def begin(self) -> None:
        """Nothing has ended of the call that begins."""
        self._ended = self._scored = 0
        self._write()

    def add(self, episode: Episode) -> None:
        """It has ended."""
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


def clear(logs: Path) -> None:
    """Forget the call before."""
    for file in logs.glob(f"rollout-*{SUFFIX}"):
        with contextlib.suppress(OSError):
            file.unlink()
