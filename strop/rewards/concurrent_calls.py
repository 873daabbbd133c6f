"""Calls that one worker process has under way at the same time, as the pool follows them.

The process itself ends calls that take too long (worker_coroutines.py). Here is the limit behind it: a process whose
loop stands still longer than a call may take is ended. A call that was the only one in its process is to blame for such
an end; where there were several, `leave` has each scored again alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from strop.rewards.outcome import Outcome
from strop.rewards.wire import outcome_of, outcomes_of

if TYPE_CHECKING:
    from strop.rewards.config import RewardConfig
    from strop.rewards.worker_process import WorkerProcess

CallResult = Outcome | list[Outcome]
"""Of one answer, or of a group that failed as a whole; of each answer of a group."""
_GRACE_S = 0.5
"""Time that a process has to say that a call has reached its limit, in seconds: its loop says more often that it
turns."""


@dataclass(frozen=True, order=True, kw_only=True)
class Call:
    """One answer, or a group of them, to score."""

    number: int
    """Its place in the queue."""
    line: bytes = field(compare=False)
    """For the pipe (wire.py)."""
    future: asyncio.Future[CallResult] = field(compare=False)
    """Awaited by its caller."""
    num_answers: int = field(compare=False)
    is_alone: bool = field(default=False, compare=False)
    """No other call may be under way in its process."""


@dataclass(frozen=True, kw_only=True)
class Expired:
    """A call has reached its time limit."""

    location: str
    """` at reward.py:17 in compute_score`, or empty."""
    seconds: float


@dataclass(kw_only=True)
class _UnderWay:
    call: Call
    since: float | None = None
    """When it began to score; None: it has not."""
    is_shared: bool = False
    """Another call was under way beside it, or has left something behind as it was cancelled."""


class ConcurrentCalls:
    """The calls of one process."""

    def __init__(self, process: WorkerProcess, config: RewardConfig) -> None:
        self._process, self._config = process, config
        self._calls: dict[int, _UnderWay] = {}
        self._num_sent = 0
        self._has_expired = False
        self._heard = self._away_until = 0.0

    def has_room(self, call: Call | None = None) -> bool:
        """True where one more call can be sent: this one, or any."""
        is_closed = any(other.call.is_alone for other in self._calls.values())
        limit = 1 if is_closed or (call is not None and call.is_alone) else self._config.max_concurrent
        return len(self._calls) < limit

    def send(self, call: Call) -> None:
        """Send a call to the process."""
        if not self._calls:
            self._heard = time.monotonic()
        for other in self._calls.values():
            other.is_shared = True
        is_shared = bool(self._calls) or self._has_expired
        self._calls[self._num_sent] = _UnderWay(call=call, is_shared=is_shared)
        self._num_sent += 1
        self._process.send(call.line)

    def left_s(self) -> float | None:
        """Time that the process has for its next message, in seconds; None: it has nothing to do."""
        if not self._calls:
            return None
        limit_s = self._config.timeout_s * max(other.call.num_answers for other in self._calls.values())
        return max(0.0, max(self._heard, self._away_until) + limit_s + _GRACE_S - time.monotonic())

    def hear(self, message: list[Any]) -> tuple[Call, CallResult | Expired] | None:
        """Note a message of the process; returns a call that has ended, with its result.

        Raises:
            ValueError: it is no message of a worker of ours.
        """
        self._heard = time.monotonic()
        match message:
            case ["alive"]:
                return None
            case ["back"]:
                self._away_until = 0.0
                return None
            case ["away", float() | int() as at_most_s]:
                self._away_until = max(self._away_until, self._heard + at_most_s)
                return None
            case ["grading", (int() | None) as comparison]:
                self._process.grading = comparison
                return None
            case ["call", int(number), "start"] if number in self._calls:
                self._calls[number].since = self._heard
                return None
            case ["call", int(number), "memory", *_] if self._is_shared(number):
                return None  # the process ends after those under way, and the call is scored again, alone
            case ["call", int(number), *result] if number in self._calls:
                ended = _result_of(result)
                self._has_expired = self._has_expired or isinstance(ended, Expired)
                self._process.calls_done += 1
                return self._calls.pop(number).call, ended
        raise ValueError(f"no message of a reward worker: {str(message)[:200]}")

    def _is_shared(self, number: int) -> bool:
        """True where a call may have got what another filled or left behind."""
        return number in self._calls and self._calls[number].is_shared

    def leave(self, calls: deque[Call]) -> list[Call]:
        """Calls to be scored by another process, after this one has ended. One that is to blame for that goes into
        `calls`, with its start in `process.since`; and so do those that it had not begun, where no other had it."""
        present, self._calls = list(self._calls.values()), {}
        begun = [other for other in present if other.since is not None]
        waiting = [other.call for other in present if other.since is None]
        if not begun:
            calls.extend(waiting)
            return []
        if len(begun) == 1 and not begun[0].is_shared:
            self._process.since = begun[0].since
            calls.append(begun[0].call)
            return waiting
        self._process.gave_back = True
        return [*waiting, *(replace(other.call, is_alone=True) for other in begun)]


def _result_of(message: list[Any]) -> CallResult | Expired:
    match message:
        case ["timeout", str(location), float() | int() as seconds]:
            return Expired(location=location, seconds=seconds)
        case ["memory", str(error), float() | int() as seconds]:
            return Outcome(kind="error", error=error, seconds=seconds)
        case ["all", *_]:
            return outcomes_of(message)
    return outcome_of(message)
