"""Requests per second, as a bucket of tokens: it fills at the rate and holds a second's worth; a request takes one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class TokenBucket:
    """Lets at most `rate` requests start per second, after a burst of at most max(1, rate).

    Over any span of t seconds at most max(1, rate) + rate * t start. First come, first served.
    """

    def __init__(
        self,
        rate: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        rate: requests per second; None lets all pass.
        clock, sleep: of the time that counts.
        """
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._size = max(1.0, rate or 0.0)
        self._tokens = self._size
        self._at = clock()

    async def take(self) -> None:
        """Wait for a token."""
        if self._rate is None:
            return
        now = self._clock()
        self._tokens = min(self._size, self._tokens + (now - self._at) * self._rate)
        self._at = now
        self._tokens -= 1.0  # may be owed: who comes next waits longer
        if self._tokens < 0:
            await self._sleep(-self._tokens / self._rate)
