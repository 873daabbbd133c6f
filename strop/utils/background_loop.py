"""Event loops in threads of their own, for what outlives the loop of any one caller or may block it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Begins with its first coroutine and runs to the end of the process, in a daemon thread."""

    def __init__(self, name: str) -> None:
        """Args:
        name: of the thread.
        """
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0

    @property
    def is_running(self) -> bool:
        """It has begun in this process."""
        with self._lock:
            return self._loop is not None and self._pid == os.getpid()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """The coroutine's result, from any thread; cancelling the future cancels the coroutine."""
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                self._loop, self._pid = asyncio.new_event_loop(), os.getpid()
                self.begin()
                threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def begin(self) -> None:
        """Called before the loop runs, also in a child process that has none of its parent's."""


class EventLoopThread:
    """As asyncio.Runner, with a loop that goes on in a thread of its own between the calls of `run`."""

    def __init__(self, name: str) -> None:
        """Args:
        name: of the thread.
        """
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """The coroutine's result, from any thread; cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, when it has one; from any other thread."""
        future = self.submit(work)
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
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
