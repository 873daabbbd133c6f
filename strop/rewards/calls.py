"""Calls of a reward pool: one sample each, and who waits for its outcome."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from strop.rewards.outcome import Outcome
from strop.rewards.wire import decode, encode

log = logging.getLogger(__name__)

_MAX_LEFT_OUT = 3
"""Comparisons of one sample that are left out, after which its deaths are errors."""


@dataclass(kw_only=True, eq=False)
class Call:
    """One sample to score, and who waits for it."""

    number: int
    line: bytes
    """For the pipe of a worker (wire.py)."""
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Outcome]

    def leave_out(self, comparison: int | None) -> bool:
        """Have it done again without the comparison that ended the process, whose answer is wrong; False where none
        is known, or too many are left out already."""
        message = decode(self.line)
        if comparison is None or len(message) - 2 >= _MAX_LEFT_OUT:
            return False
        self.line = encode([*message, comparison])
        return True


def deliver(done: Sequence[tuple[Call, Outcome]]) -> None:
    """Resolve the futures of finished calls, from any thread: one wake-up per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Call, Outcome]]] = {}
    for call, outcome in done:
        by_loop.setdefault(call.loop, []).append((call, outcome))
    for loop, pairs in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, pairs)
        except RuntimeError:  # the loop is closed: nobody waits there any more
            log.debug("dropped %d outcomes of a closed event loop", len(pairs))


def _resolve(pairs: Sequence[tuple[Call, Outcome]]) -> None:
    for call, outcome in pairs:
        if not call.future.done():
            call.future.set_result(outcome)


def unscored(reason: str) -> Outcome:
    """Of a call that no worker will take any more."""
    return Outcome(kind="infrastructure", error=f"not scored: {reason}")
