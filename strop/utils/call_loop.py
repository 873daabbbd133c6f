"""The event loop of a worker whose work outlives the call that began it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio import Handle
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
QUIET_TURNS = 10_000
"""Turns of a loop after which nobody waits for it to become quiet."""


class CallLoop(asyncio.SelectorEventLoop):
    """A loop that runs from time to time, and whose clock stands still in between.

    A deadline of something that waits (an answer of a tool, of a scorer, of an engine) then counts the time in which it
    could have been served, not that in which its process did something else.
    """

    def __init__(self) -> None:
        self._stood_s = 0.0
        self._stands_since: float | None = time.monotonic()
        self.num_scheduled = 0
        """Callbacks that were to be called in the turn after."""
        super().__init__()

    def time(self) -> float:
        """Seconds, of those in which it ran."""
        now = time.monotonic() if self._stands_since is None else self._stands_since
        return now - self._stood_s

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> Handle:
        """As of every loop."""
        self.num_scheduled += 1
        return super().call_soon(callback, *args, context=context)

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        """While it runs."""
        assert self._stands_since is not None, "it runs once at a time"
        self._stood_s += time.monotonic() - self._stands_since
        self._stands_since = None
        try:
            yield
        finally:
            self._stands_since = time.monotonic()


async def quiet() -> None:
    """Wait until every other task of a CallLoop waits for something from outside, or for this one; no longer than
    QUIET_TURNS."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, CallLoop), "its turns are counted"
    for _ in range(QUIET_TURNS):
        before = loop.num_scheduled
        await asyncio.sleep(0)
        if loop.num_scheduled == before + 1:  # this task alone
            return


class CallEventLoop:
    """As asyncio.Runner with a CallLoop; a call that a signal ends leaves no task behind."""

    def __init__(self) -> None:
        self.loop = CallLoop()
        """The loop of all calls."""
        self._runner = asyncio.Runner(loop_factory=lambda: self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. What a signal handler raises ends all that this call began."""
        before = asyncio.all_tasks(self.loop)
        with self.loop.going():
            try:
                return self._runner.run(work)
            except (KeyboardInterrupt, SystemExit):
                _end(self.loop, before)
                raise

    def close(self) -> None:
        """Cancel what is left, and end the loop; a second call does nothing."""
        with self.loop.going():
            self._runner.close()
        self.loop.close()


def _end(loop: asyncio.AbstractEventLoop, but: set[asyncio.Task[Any]]) -> None:
    """Cancel all other tasks. One that awaits a task with a KeyboardInterrupt raises it once more, out of the loop."""
    ended: set[asyncio.Task[Any]] = set()
    while tasks := asyncio.all_tasks(loop) - but:
        ended |= tasks
        with contextlib.suppress(KeyboardInterrupt):
            loop.run_until_complete(_cancelled(tasks))
    for task in ended:
        if not task.cancelled():
            task.exception()  # looked at, so that nothing is said of it


async def _cancelled(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
