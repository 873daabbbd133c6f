"""Calls per second, as a bucket of tokens: it fills at the rate and holds a second's worth; a call takes one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable


class TokenBucket:
    """Lets at most `rate` calls start per second, after a burst of at most max(1, rate).

    Over any span of t seconds at most max(1, rate) + rate * t start. First come, first served; one that is cancelled
    while it waits takes no token. All calls must come from one event loop.
    """

    def __init__(
        self,
        rate: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Args:
        rate: calls per second; None lets all pass.
        clock, sleep: of the time that counts.
        """
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._size = max(1.0, rate or 0.0)
        self._tokens = self._size
        self._at = clock()
        self._turn = asyncio.Lock()

    async def take(self) -> None:
        """Wait for a token."""
        if self._rate is None:
            return
        async with self._turn:
            self._fill(self._rate)
            if self._tokens < 1.0:
                await self._sleep((1.0 - self._tokens) / self._rate)
                self._fill(self._rate)
            self._tokens -= 1.0

    def _fill(self, rate: float) -> None:
        now = self._clock()
        self._tokens = min(self._size, self._tokens + (now - self._at) * rate)
        self._at = now
