"""Activity of this process: the work it does (`doing`) and the things it waits for (`item`).

strop.utils writes both down, so that a run that died or hangs can be looked into.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

steps: list[tuple[str, float]] = []
items: dict[int, tuple[str, str, float]] = {}
_numbers = itertools.count()


@contextlib.contextmanager
def doing(activity: str) -> Iterator[None]:
    """The process does this, within what it did before; for its main thread."""
    steps.append((activity, time.monotonic()))
    try:
        yield
    finally:
        steps.pop()


@contextlib.contextmanager
def item(name: str) -> Iterator[Callable[[str], None]]:
    """Something that is waited for, beside others; what is given says what is done with it now."""
    number, since = next(_numbers), time.monotonic()
    items[number] = (name, "", since)

    def now(stage: str) -> None:
        items[number] = (name, stage, since)

    try:
        yield now
    finally:
        del items[number]
