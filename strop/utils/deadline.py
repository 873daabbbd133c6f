"""Time that has limits of its own, as that of a program in a sandbox, is not counted by the deadline of a sample.

Waiting for a place, starting and running a program each have such limits, and a program that reaches one has an outcome
that counts. A deadline around all of it would turn a busy machine, or a program that takes its time, into a sample
without a score. So a process that scores under a deadline is told when its main thread is away, and for how long at
most; in other processes nobody listens.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

Tell = Callable[[float | None], None]


class _Away:
    """Number of `away` blocks the main thread is in: tasks of one event loop may be in several."""

    def __init__(self) -> None:
        self.tell: Tell | None = None
        self.depth = 0


_away = _Away()


def listen(tell: Tell) -> None:
    """Have `tell` called in the main thread: with the most seconds that it will be away, and with None when back."""
    _away.tell = tell


@contextlib.contextmanager
def away(at_most_s: float) -> Iterator[None]:
    """A block with limits of its own, which ends within that time."""
    if _away.tell is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    _away.depth += 1
    _away.tell(at_most_s)
    try:
        yield
    finally:
        _away.depth -= 1
        if not _away.depth:
            _away.tell(None)
