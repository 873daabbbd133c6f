"""Event loops of a worker whose work outlives the call that began it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class CallLoop(asyncio.SelectorEventLoop):
    """A loop that runs from time to time, and whose clock stands still in between.

    A deadline of something that waits (an answer of a tool, of a scorer, of an engine) then counts the time in which it
    could have been served, not that in which its process did something else.
    """

    def __init__(self) -> None:
        self._stood_s = 0.0
        self._stands_since: float | None = time.monotonic()
        super().__init__()

    def time(self) -> float:
        """Seconds, of those in which it ran."""
        now = time.monotonic() if self._stands_since is None else self._stands_since
        return now - self._stood_s

    def run_forever(self) -> None:
        """As every loop; `run_until_complete` comes by here."""
        assert self._stands_since is not None, "it runs once at a time"
        self._stood_s += time.monotonic() - self._stands_since
        self._stands_since = None
        try:
            super().run_forever()
        finally:
            self._stands_since = time.monotonic()


class CallRunner:
    """As asyncio.Runner with a CallLoop; a call that a signal ends leaves no task behind."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=CallLoop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. What a signal handler raises ends all that this call began."""
        loop = self.loop
        before = asyncio.all_tasks(loop)
        try:
            return self._runner.run(work)
        except (KeyboardInterrupt, SystemExit):
            _end(loop, before)
            raise

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of all calls."""
        return self._runner.get_loop()

    def close(self) -> None:
        """Cancel what is left, and end the loop; a second call does nothing."""
        self._runner.close()


def _end(loop: asyncio.AbstractEventLoop, but: set[asyncio.Task[Any]]) -> None:
    """Cancel all other tasks. One that awaits a task with a KeyboardInterrupt raises it once more, out of the loop."""
    ended: set[asyncio.Task[Any]] = set()
    while others := asyncio.all_tasks(loop) - but:
        ended |= others
        with contextlib.suppress(KeyboardInterrupt):
            loop.run_until_complete(_cancelled(others))
    for task in ended:
        if not task.cancelled():
            task.exception()  # looked at, so that nothing is said of it


async def _cancelled(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


class ThreadRunner:
    """As asyncio.Runner, with a loop that goes on in a thread of its own between the calls of `run`."""

    def __init__(self, name: str) -> None:
        """Args:
        name: of the thread.
        """
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, when it has one; from any other thread."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what is left, and end the loop; a second call does nothing."""
        if not self._loop.is_closed():
            self.run(_cancel_others())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
