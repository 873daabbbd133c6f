"""How the time of a function grows with the size of what it reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SIZES = 250, 500, 1000, 2000
"""n, 2n, 4n and 8n repetitions."""
_FACTOR = 24
"""Of the time at 8n to that at n; 8 where time is in proportion, 64 where it is quadratic."""
_TOO_LITTLE_S = 0.03
"""Processor time at 8n below which nothing is compared: what is quadratic takes more there."""


def assert_linear(
    function: Callable[[Any], object], made: Callable[[int], Any], *, sizes: tuple[int, ...] = SIZES
) -> None:
    """Fail where the processor time of `function(made(n))` grows faster than n; all of `sizes` are tried."""
    for size in sizes[1:-1]:
        function(made(size))
    last = made(sizes[-1])
    if _seconds(function, last) < _TOO_LITTLE_S:
        return
    first = made(sizes[0])
    for _ in range(3):
        small = min(_seconds(function, first) for _ in range(5))
        large = min(_seconds(function, last) for _ in range(2))
        if large < _FACTOR * small * sizes[-1] / (8 * sizes[0]):
            return
    raise AssertionError(
        f"{sizes[0]} repetitions took {small:.4f} s of processor time, {sizes[-1]} took {large:.4f} s: "
        f"{str(last)[:200]!r}"
    )


def _seconds(function: Callable[[Any], object], given: Any) -> float:
    start = time.thread_time()
    function(given)
    return time.thread_time() - start
