"""Activity of this process: the work it does (`activity`) and the things it waits for (`waiting_on`).

The heartbeat of the process writes both down, so that a run that died or hangs can be looked into.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

activities: list[tuple[str, float]] = []
"""Name and start of each activity of the main thread, the innermost last."""
waits: dict[int, tuple[str, str, float]] = {}
"""Name, stage and start of each thing that is waited for."""
_numbers = itertools.count()


@contextlib.contextmanager
def activity(name: str) -> Iterator[None]:
    """An activity of the process's main thread, within the one that it had before."""
    activities.append((name, time.monotonic()))
    try:
        yield
    finally:
        activities.pop()


@contextlib.contextmanager
def waiting_on(name: str) -> Iterator[Callable[[str], None]]:
    """Something that is waited for, beside others; gives a function that sets its stage."""
    number, since = next(_numbers), time.monotonic()
    waits[number] = (name, "", since)

    def set_stage(stage: str) -> None:
        waits[number] = (name, stage, since)

    try:
        yield set_stage
    finally:
        del waits[number]
