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
from contextvars import ContextVar

Tell = Callable[[float | None], None]


class _Listener:
    """Told of the `away` blocks of one call: tasks of an event loop may be in several of them."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.depth = 0


_listener: ContextVar[_Listener | None] = ContextVar("listener", default=None)


def listen(tell: Tell) -> None:
    """Have `tell` called in the main thread, in this context and the tasks that it starts: with the most seconds that
    the work will be away, and with None when it is back."""
    _listener.set(_Listener(tell))


@contextlib.contextmanager
def away(at_most_s: float) -> Iterator[None]:
    """A block with limits of its own, which ends within that time."""
    listener = _listener.get()
    if listener is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    listener.depth += 1
    listener.tell(at_most_s)
    try:
        yield
    finally:
        listener.depth -= 1
        if not listener.depth:
            listener.tell(None)
