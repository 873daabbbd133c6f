"""Compute budget of grading one answer. An answer beyond it is wrong, which is the answer's doing and not the grader's.

A model that learns may write what no grader can work out: towers of powers, factorials of factorials, brackets five
thousand deep. Without a score such a sample would leave training, and writing it would be a way around a bad one. So a
comparison has BUDGET_S seconds of computing, and one that needs more, or runs out of stack or memory, ends as a wrong
answer with a note.

Seconds of computing, not of the clock: a busy machine makes no right answer wrong. They are counted in the worker
processes of the reward pool alone (`Guard`); elsewhere a comparison takes as long as it takes. A timer of the process
raises an exception in Python code. Where the hang is in C, the kernel ends the process a little later (RLIMIT_CPU), as
it does when the stack overflows; the pool then has the sample scored again with the comparison that did it left out.
"""

from __future__ import annotations

import contextlib
import math
import resource
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
BUDGET_S = 2.0
"""Seconds of computing for one comparison."""
SHARE_OF_DEADLINE = 0.25
"""Of the pool's deadline (seconds of the clock), where that is less."""
_AGAIN_S = 0.25
"""The exception comes again while a library that caught it goes on."""


class OutOfBudget(BaseException):
    """A comparison has used up what it may. No Exception, because libraries catch those and go on."""


class Guard:
    """Limits the comparisons of one worker process, and tells the pool when one is under way."""

    def __init__(self, tell: Callable[[int | None], None], *, timeout_s: float) -> None:
        """Args:
        tell: takes the number of a comparison within its sample as it begins, and None as it ends.
        timeout_s: of the pool, on the clock.
        """
        self._tell = tell
        self._budget_s = min(BUDGET_S, SHARE_OF_DEADLINE * timeout_s)
        self._is_armed = self._is_over = False
        self._number = 0
        self._hopeless: Collection[int] = ()
        self.has_interrupted = False
        """A comparison was interrupted, perhaps while a library changed something that others use: the process should
        be replaced."""
        signal.signal(signal.SIGPROF, self._on_signal)

    def begin(self, hopeless: Collection[int]) -> None:
        """A sample begins; these of its comparisons have ended a process before."""
        self._number, self._hopeless = 0, hopeless

    @contextlib.contextmanager
    def comparison(self) -> Iterator[None]:
        """Limit what happens inside.

        Raises:
            OutOfBudget: it has ended a process before, or takes too long.
        """
        number, self._number = self._number, self._number + 1
        if number in self._hopeless:
            raise OutOfBudget
        self._tell(number)
        soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
        try:
            # Whole seconds, a second later than the timer at least.
            resource.setrlimit(
                resource.RLIMIT_CPU, (math.ceil(time.process_time() + self._budget_s) + 1, hard)
            )
            self._is_armed, self._is_over = True, False
            signal.setitimer(signal.ITIMER_PROF, self._budget_s, _AGAIN_S)
            try:
                yield
            finally:
                self._is_armed = False
            if self._is_over:  # a library caught it, and what it says then means nothing
                raise OutOfBudget
        finally:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
            self._tell(None)

    def _on_signal(self, _number: int, _frame: object) -> None:
        if self._is_armed:
            self.has_interrupted = self._is_over = True
            raise OutOfBudget


_guard: Guard | None = None


def use(guard: Guard) -> None:
    """Limit comparisons in this process, in its main thread, from here on."""
    global _guard
    _guard = guard


def bounded(compare: Callable[[], T], otherwise: T) -> tuple[T, str]:
    """Result of a comparison and an empty text; or `otherwise` and the reason why there is no result.

    Args:
        compare: decides about an answer. It changes nothing that matters after it was interrupted.
        otherwise: result for an answer that cannot be graded.
    """
    is_guarded = _guard is not None and threading.current_thread() is threading.main_thread()
    try:
        with _guard.comparison() if _guard is not None and is_guarded else contextlib.nullcontext():
            return compare(), ""
    except OutOfBudget:
        return otherwise, "not graded: the comparison took too much computing"
    except (RecursionError, MemoryError) as error:
        return otherwise, f"not graded: the comparison ended with {type(error).__name__}"


def with_note(graded: dict[str, Any], note: str) -> dict[str, Any]:
    """Add a note to the result of a scorer, where there is one."""
    return {**graded, "note": note} if note else graded
