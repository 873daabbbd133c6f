"""Named phases of a step: how long each took, and which one is running now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Phases:
    """Seconds per phase of one step. A phase that runs twice adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.current = ""
        """Name of the phase that runs; empty between phases. A crash report names it."""
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as `name`."""
        start, outer = time.perf_counter(), self.current
        self.current = name
        yield
        # Not in a finally: after an exception `current` still says where it happened.
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.current = outer

    def total(self) -> float:
        """Seconds since this object was made."""
        return time.perf_counter() - self._start
