"""Waits that last as long as something arrives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SILENCE_S = 60.0
"""How long a store or a hub may send nothing before a fetch ends, in seconds."""


def while_heard(
    work: Callable[[], T],
    progress: Callable[[], int],
    silence_s: float = SILENCE_S,
    *,
    show: Callable[[int], object] = lambda progress: None,
) -> T:
    """The result of `work`, done in a thread of its own as long as `progress` grows.

    Stores have deadlines of their own, of minutes or none. A thread that waits for a silent store cannot be
    stopped; it is left behind and does not keep the process alive.

    Args:
        work: what is done.
        progress: how far it is, for example in bytes.
        silence_s: how long it may stand still, in seconds.
        show: is told how far it is, about once a second.

    Raises:
        TimeoutError: `progress` has not changed for `silence_s` seconds.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001  # raised again below, in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="fetch")
    thread.start()
    seen, heard_at = progress(), time.monotonic()
    while thread.is_alive():
        thread.join(min(silence_s / 4, 1.0))
        now = progress()
        if now != seen:
            seen, heard_at = now, time.monotonic()
            show(now)
        elif time.monotonic() - heard_at > silence_s and thread.is_alive():
            raise TimeoutError(f"nothing was received for {silence_s:g} s")
    if errors:
        raise errors[0]
    return results[0]
