"""Calls of coroutine functions in a worker process, several at a time in one event loop.

Each call has a time limit of its own. Time in which the process waits counts for each of them; time in which it
computes, on the loop or in threads, is divided equally between them; that of a call in a sandbox, and of imports, does
not count. A task takes it from what the calls have left, and tells the parent that the loop turns, every `_TICK_S`. A
call that has none left is cancelled and reported, and the others go on. Where one blocks the loop, the parent hears
nothing and ends the process.

A function that is no coroutine is called between two turns of the loop, where none runs: so `asyncio.run` works in it,
as it does where samples are scored one at a time. `run` does that, and waits for nothing else. The process exits when
the parent closes the pipe. One that should be replaced takes no further call, and exits after those under way.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import selectors
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from strop.rewards.functions import RewardFunction
from strop.rewards.outcome import Outcome
from strop.rewards.scorers import budget
from strop.rewards.worker_scoring import OutOfMemory, Scoring, awaited, prepare, result_message, source_of
from strop.utils import deadline
from strop.utils.json_lines import decode

_TICK_S = 0.1
"""Interval of looking at the time of the calls, in seconds."""
_CANCEL_S = 1.0
"""Time that a cancelled call has to end before the process is replaced, in seconds."""
_MAX_LINE_BYTES = 1 << 40
"""No limit: a line is as long as the parent made it."""


class _Call:
    """One call that is under way."""

    def __init__(self, limit_s: float) -> None:
        self.left_s = limit_s
        self.away_until = 0.0
        """End of its time in a sandbox, at the latest, on the monotonic clock."""
        self.coroutine: Coroutine[Any, Any, Any] | None = None
        """The present one of the user's functions."""
        self.expired = asyncio.get_running_loop().create_future()

    @property
    def is_away(self) -> bool:
        """It is in a sandbox, which has limits of its own."""
        return time.monotonic() < self.away_until


class _Watch(selectors.DefaultSelector):
    """Selector of the event loop, which tells waiting from computing."""

    def __init__(self) -> None:
        super().__init__()
        self._waited_s = 0.0
        self._last = self._now()

    def _now(self) -> tuple[float, float, float]:
        return time.monotonic(), self._waited_s, time.process_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for the next event."""
        began = time.monotonic()
        ready = super().select(timeout)
        self._waited_s += time.monotonic() - began
        return ready

    def lap(self) -> tuple[float, float]:
        """Seconds that the process has waited, and computed, since the last time, together those of the clock. It
        computes while the loop is not in `select`, and where threads use the processor."""
        before, self._last = self._last, self._now()
        elapsed_s, waited_s, cpu_s = (now - then for now, then in zip(self._last, before, strict=True))
        computing_s = min(elapsed_s, max(elapsed_s - waited_s, cpu_s))
        return elapsed_s - computing_s, computing_s


class Serving:
    """The calls of a worker process; `run` it."""

    def __init__(
        self,
        commands: BinaryIO,
        tell: Callable[..., None],
        functions: Sequence[RewardFunction],
        setup: Mapping[str, Any],
    ) -> None:
        """Args:
        commands: pipe with the calls.
        tell: writes a message to the parent.
        functions: that score.
        setup: with timeout_s, start_timeout_s, max_concurrent and memory_limit.
        """
        self._commands, self._tell, self._functions, self._setup = commands, tell, functions, setup
        self._paths = {function.path for function in functions} - {""}
        self._guard = budget.Guard(
            lambda comparison: tell("grading", comparison), timeout_s=setup["timeout_s"]
        )
        self._jobs: asyncio.Queue[Callable[[], object]] = asyncio.Queue()
        """Work to be done where no loop runs."""
        self._calls: set[_Call] = set()
        self._prepared: set[str] = set()
        self._pid = os.getpid()
        self._watch = _Watch()
        self._num_expired = 0
        self._is_spent = False
        """The process should be replaced."""

    def run(self) -> None:
        """Score until the process exits."""
        budget.use(self._guard)
        loop = asyncio.SelectorEventLoop(self._watch)
        # A place for each call, beside those that calls which have reached their limit still hold.
        loop.set_default_executor(ThreadPoolExecutor(2 * self._setup["max_concurrent"]))
        serving = loop.create_task(self._serve_all())  # it ends with an error only
        serving.add_done_callback(lambda _: self._jobs.put_nowait(serving.result))
        while True:
            loop.run_until_complete(self._jobs.get())()

    async def _serve_all(self) -> None:
        """Serve each call that comes, beside the others."""
        lines = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), self._commands
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            number = 0
            while (line := await lines.readline()) and not self._is_spent:
                tasks.create_task(self._serve(number, line))
                number += 1
            if not self._is_spent:
                os._exit(0)  # tasks that a function left behind are nobody's

    async def _tick(self) -> None:
        """Have the time of the calls pass, and tell the parent that the loop turns."""
        while True:
            await asyncio.sleep(_TICK_S)
            self._charge()
            for call in self._calls:
                if call.left_s <= 0.0 and not call.expired.done():
                    call.expired.set_result(None)
            if self._calls:
                self._tell("alive")

    def _charge(self, *, computing_counts: bool = True) -> None:
        """Take the time since the last charge from what the calls have left.

        Args:
            computing_counts: False where the process has computed for something with a limit of its own.
        """
        waiting_s, computing_s = self._watch.lap()
        share_s = computing_s / max(1, len(self._calls)) if computing_counts else 0.0
        for call in self._calls:
            if not call.is_away:
                call.left_s -= waiting_s + share_s

    async def _serve(self, number: int, line: bytes) -> None:
        """Score one call within its limit, and say what came of it."""
        request, *hopeless = decode(line)
        if (source := source_of(request)) not in self._prepared:
            await self._outside(partial(self._prepare, source))
        call = _Call(self._setup["timeout_s"] * (len(request) if isinstance(request, list) else 1))
        began = time.monotonic()
        self._charge()
        self._calls.add(call)
        deadline.listen(partial(self._away, call))
        self._tell("call", number, "start")
        self._guard.begin(hopeless)
        scoring = asyncio.create_task(Scoring(self._functions, partial(self._invoke, call)).score(request))
        await asyncio.wait({scoring, call.expired}, return_when=asyncio.FIRST_COMPLETED)
        if os.getpid() != self._pid:
            os._exit(0)  # a copy that the function has forked
        seconds = time.monotonic() - began
        if scoring.done():
            self._tell("call", number, *self._result_of(scoring, seconds))
        else:
            self._tell("call", number, "timeout", _location(call.coroutine, self._paths), seconds)
            await self._cancel(scoring)
        self._charge()  # it pays its share of what was computed until now
        self._calls.remove(call)
        if self._is_spent and not self._calls:
            os._exit(0)

    def _prepare(self, source: str) -> None:
        """Import what scoring a data source needs; the calls that are under way wait for it."""
        self._tell("away", self._setup["start_timeout_s"])
        prepare(self._functions, source)
        self._prepared.add(source)
        self._charge(computing_counts=False)
        self._tell("back")

    def _away(self, call: _Call, at_most_s: float | None) -> None:
        """The call goes to a sandbox, for so many seconds at most; None: it is back. It may block the loop."""
        self._charge(computing_counts=not call.is_away)
        if at_most_s is None:
            call.away_until = 0.0
            self._tell("back")
        else:
            call.away_until = max(call.away_until, time.monotonic() + at_most_s)
            self._tell("away", at_most_s)

    def _result_of(self, scoring: asyncio.Task[Any], seconds: float) -> list[Any]:
        """The message about a call that has ended by itself (wire.py)."""
        try:
            result = scoring.result()
        except asyncio.CancelledError:  # it would pass for the end of this process's own task
            result = Outcome(kind="error", error="the function cancelled the task that it runs in")
        except OutOfMemory as error:
            self._is_spent = True
            return ["memory", f"{error}{self._setup['memory_limit']}", seconds]
        self._is_spent = self._is_spent or self._guard.has_interrupted
        return result_message(result, seconds)

    async def _cancel(self, scoring: asyncio.Task[Any]) -> None:
        """End a call that has reached its limit. What it leaves behind, as threads, ends with the process: after as
        many such calls as may be under way, or one that does not end."""
        scoring.cancel()
        ended, _ = await asyncio.wait({scoring}, timeout=_CANCEL_S)
        self._num_expired += 1
        self._is_spent = self._is_spent or not ended or self._num_expired >= self._setup["max_concurrent"]

    async def _invoke(self, call: _Call, work: Callable[[], Any]) -> Any:
        """The value of a function, awaited where it is a coroutine."""
        returned = await self._outside(work)
        if not inspect.isawaitable(returned):
            return returned
        call.coroutine = awaited(returned)
        return await call.coroutine

    async def _outside(self, work: Callable[[], Any]) -> Any:
        """The value of a function that is called where no loop runs."""
        future: asyncio.Future[tuple[Any, BaseException | None]] = asyncio.get_running_loop().create_future()
        context = copy_context()

        def job() -> None:
            if future.done():  # its call was cancelled
                return
            try:
                future.set_result((context.run(work), None))
            except BaseException as error:  # noqa: BLE001 (it belongs to the call that waits for it)
                traceback.clear_frames(error.__traceback__)  # which hold what has filled the memory
                future.set_result((None, error))

        self._jobs.put_nowait(job)
        value, error = await future
        if error is not None:
            raise error
        return value


def _location(coroutine: Awaitable[Any] | None, paths: Collection[str]) -> str:
    """` at reward.py:17 in compute_score`: the innermost line in the user's files that a coroutine waits at."""
    location = ""
    while coroutine is not None:
        frame = getattr(coroutine, "cr_frame", None)
        if frame is not None and frame.f_code.co_filename in paths:
            file = Path(frame.f_code.co_filename).name
            location = f" at {file}:{frame.f_lineno} in {frame.f_code.co_name}"
        coroutine = getattr(coroutine, "cr_await", None)
    return location
