"""Waits that last as long as something arrives."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from strop.base.background import in_background

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
    fetched = in_background(work, name="fetch")
    seen, heard_at = progress(), time.monotonic()
    while not fetched.done():
        wait([fetched], min(silence_s / 4, 1.0))
        now = progress()
        if now != seen:
            seen, heard_at = now, time.monotonic()
            show(now)
        elif time.monotonic() - heard_at > silence_s and not fetched.done():
            raise TimeoutError(f"nothing was received for {silence_s:g} s")
    return fetched.result()
