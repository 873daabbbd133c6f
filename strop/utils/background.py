"""Work in a thread beside the process's own: once, or from time to time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], *, name: str) -> Future[T]:
    """A future of `work`, which runs in a thread of that name.

    A process that must end does not wait for it, as it would for a pool of threads: the disk or the store that the
    work waits for may hang. Whoever needs the result asks for it.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:  # noqa: BLE001  (raised again where the result is asked for)
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


@contextlib.contextmanager
def every(seconds: float, do: Callable[[], object], *, name: str) -> Iterator[None]:
    """Meanwhile, `do` is called every so many seconds, in a thread of that name, which has ended afterwards."""
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.wait(seconds):
            do()

    thread = threading.Thread(target=go_on, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
