"""Something that is done from time to time, beside what the process does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


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
