"""Calls of coroutine functions in a worker process, several at a time in one event loop.

Each call has a time limit of its own, which leaves out what other calls compute (`_Clock`): on the loop, where each
waits for the others' steps, and in threads, whose computing is divided equally. A call that reaches its limit is
cancelled and reported, and the others go on; threads that it leaves behind are ended with the process, after as many
such calls as may be under way. Where one blocks the loop itself, nobody is told of time any more, and the
parent ends the process; the beat of the loop, `_BEAT_S`, is how it knows.

Functions that are no coroutines are called between two turns of the loop, where none runs: so `asyncio.run` works in
them, as it does where samples are scored one at a time. `run` does that, and waits for nothing else; it returns when
the parent closes the pipe. A process that should be replaced takes no further call, and exits after the last of those
under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from strop.rewards.functions import RewardFunction
from strop.rewards.outcome import Outcome
from strop.rewards.scorers import budget
from strop.rewards.worker_scoring import OutOfMemory, Scoring, awaited, prepare, result_message, source_of
from strop.utils import deadline
from strop.utils.json_lines import decode

_BEAT_S = 1.0
"""Interval of saying that the loop turns, in seconds."""
_CANCEL_S = 1.0
"""Time that a cancelled call has to end before the process is replaced, in seconds."""
_LEAST_WAIT_S = 0.01
_MAX_LINE_BYTES = 1 << 40
"""No limit: a line is as long as the parent made it."""
Job = Callable[[], None]


class _Clock:
    """Time of one call: that of the wall, without the computing of other calls and without time away."""

    _computing_s = 0.0
    """Of all calls of this process."""

    def __init__(self) -> None:
        self._began, self._computing_before_s = time.monotonic(), _Clock._computing_s
        self._own_s = self._away_s = self._left_out_s = 0.0
        self._away_since = self._away_until = 0.0
        self._is_away = False

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """A piece of computing of this call, on which the other calls wait."""
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._own_s += seconds
            _Clock._computing_s += seconds

    def leave_out(self, seconds: float) -> None:
        """Time in which other calls computed elsewhere."""
        self._left_out_s += seconds

    def away(self, at_most_s: float | None) -> None:
        """The call is away, and for how long at most; None: it is back."""
        now = time.monotonic()
        if at_most_s is None:
            self._away_s, self._is_away = self._away_seconds(now), False
        elif self._is_away:
            self._away_until = max(self._away_until, now + at_most_s)
        else:
            self._is_away, self._away_since, self._away_until = True, now, now + at_most_s

    def _away_seconds(self, now: float) -> float:
        present_s = min(now, self._away_until) - self._away_since if self._is_away else 0.0
        return self._away_s + present_s

    def seconds(self) -> float:
        """Seconds that count towards the limit."""
        now = time.monotonic()
        others_s = _Clock._computing_s - self._computing_before_s - self._own_s + self._left_out_s
        return now - self._began - others_s - self._away_seconds(now)


class _Steps:
    """A coroutine whose steps are computing of a call."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], clock: _Clock) -> None:
        self._coroutine, self._clock = coroutine, clock

    def __await__(self) -> Generator[Any, Any, Any]:
        value: Any = None
        thrown: BaseException | None = None
        while True:
            with self._clock.computing():
                try:
                    waited_for = (
                        self._coroutine.send(value) if thrown is None else self._coroutine.throw(thrown)
                    )
                except StopIteration as end:
                    return end.value
            value = thrown = None
            try:
                value = yield waited_for
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as error:  # noqa: BLE001 (it belongs to the coroutine, as a cancellation does)
                thrown = error


class _Call:
    """One call that is under way."""

    def __init__(self, *, limit_s: float, is_alone: bool) -> None:
        self.clock, self.limit_s, self.is_alone = _Clock(), limit_s, is_alone
        self.coroutine: Coroutine[Any, Any, Any] | None = None
        """The present coroutine of the user's function."""


_current: ContextVar[_Call] = ContextVar("call")


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
        self._commands, self._tell, self._setup = commands, tell, setup
        self._scoring = Scoring(functions, self._invoke)
        self._paths = {function.path for function in functions} - {""}
        self._guard = budget.Guard(
            lambda comparison: tell("grading", comparison), timeout_s=setup["timeout_s"]
        )
        self._jobs: asyncio.Queue[Job | None] = asyncio.Queue()
        """Work to be done where no loop runs; None ends the process."""
        self._calls: set[_Call] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._prepared: set[str] = set()
        self._num_expired, self._threads_s = 0, 0.0
        self._pid = os.getpid()
        self._is_spent = False

    def run(self) -> None:
        """Score until the parent closes the pipe, or the process should be replaced."""
        budget.use(self._guard)
        loop = asyncio.new_event_loop()
        # A place for each call, beside those that calls which have reached their limit still hold.
        loop.set_default_executor(ThreadPoolExecutor(2 * self._setup["max_concurrent"]))
        background = [loop.create_task(work) for work in (self._read(), self._beat())]
        for task in background:
            task.add_done_callback(self._failed)
        while (job := loop.run_until_complete(self._jobs.get())) is not None:
            job()
        os._exit(0)  # tasks that a function left behind are nobody's

    async def _read(self) -> None:
        """Start a task for each call that comes."""
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), self._commands)
        number = 0
        while (line := await lines.readline()) and not self._is_spent:
            task = loop.create_task(self._serve(number, line))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
            number += 1
        if not self._is_spent:
            self._jobs.put_nowait(None)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            if self._tasks:
                self._tell("alive")

    def _failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._jobs.put_nowait(partial(_raise, error))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._failed(task)
        if self._is_spent and not self._tasks:
            self._jobs.put_nowait(None)

    async def _serve(self, number: int, line: bytes) -> None:
        """Score one call within its limit, and say what came of it."""
        call, *hopeless = decode(line)
        if (source := source_of(call)) not in self._prepared:
            await self._outside(partial(self._prepare, source))
        num_answers = len(call) if isinstance(call, list) else 1
        own = _Call(limit_s=self._setup["timeout_s"] * num_answers, is_alone=not self._calls)
        self._account_threads()
        for other in self._calls:
            other.is_alone = False
        self._calls.add(own)
        _current.set(own)
        deadline.listen(partial(self._away, own.clock))
        self._tell("call", number, "start")
        self._guard.begin(hopeless)
        began = time.monotonic()
        scoring = asyncio.create_task(self._scoring.score(call))
        while not scoring.done() and (left_s := own.limit_s - own.clock.seconds()) > 0:
            await asyncio.wait({scoring}, timeout=max(left_s, _LEAST_WAIT_S))
            self._account_threads()
        if os.getpid() != self._pid:
            os._exit(0)
        seconds = time.monotonic() - began
        self._calls.discard(own)
        if scoring.done():
            self._report(number, own, scoring, seconds)
        else:
            self._tell("call", number, "timeout", _location(own.coroutine, self._paths), seconds)
            self._num_expired += 1
            self._is_spent = self._is_spent or self._num_expired >= self._setup["max_concurrent"]
            await self._cancel(scoring)

    def _account_threads(self) -> None:
        """Leave out, for each call, the share of the others in what threads have computed since the last time."""
        threads_s = time.process_time() - time.thread_time()
        spent_s, self._threads_s = threads_s - self._threads_s, threads_s
        for call in self._calls:
            call.clock.leave_out(spent_s * (1.0 - 1.0 / len(self._calls)))

    def _prepare(self, source: str) -> None:
        """Import what scoring a data source needs; the calls that are under way wait for it."""
        self._tell("away", self._setup["start_timeout_s"])
        with _Clock().computing():
            prepare(self._scoring.functions, source)
        self._prepared.add(source)
        self._tell("back")

    def _away(self, clock: _Clock, at_most_s: float | None) -> None:
        clock.away(at_most_s)
        if at_most_s is None:
            self._tell("back")
        else:
            self._tell("away", at_most_s)  # the loop may stand still meanwhile

    def _report(
        self, number: int, own: _Call, scoring: asyncio.Task[Outcome | list[Outcome]], seconds: float
    ) -> None:
        try:
            result = scoring.result()
        except OutOfMemory as error:
            self._is_spent = True
            if not own.is_alone:
                return  # another call may have filled the memory: the parent has it scored again, alone
            result = Outcome(kind="error", error=f"{error}{self._setup['memory_limit']}")
        self._is_spent = self._is_spent or self._guard.has_interrupted
        self._tell("call", number, *result_message(result, seconds))

    async def _cancel(self, scoring: asyncio.Task[Any]) -> None:
        """Cancel a call; the process is to be replaced where it does not end."""
        scoring.cancel()
        done, _ = await asyncio.wait({scoring}, timeout=_CANCEL_S)
        self._is_spent = self._is_spent or not done

    async def _invoke(self, work: Callable[[], Any]) -> Any:
        """The value of a function, awaited where it is a coroutine, as computing of the present call."""
        call = _current.get()
        returned = await self._outside(partial(_computed, call.clock, work))
        if not inspect.isawaitable(returned):
            return returned
        call.coroutine = awaited(returned)
        return await _Steps(call.coroutine, call.clock)

    async def _outside(self, work: Callable[[], Any]) -> Any:
        """The value of a function that is called where no loop runs."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        context = copy_context()

        def job() -> None:
            if future.done():  # its call was cancelled
                return
            try:
                future.set_result(context.run(work))
            except StopIteration as error:
                future.set_exception(_passed_on(error))
            except BaseException as error:  # noqa: BLE001 (it belongs to the call that waits for it)
                future.set_exception(error)

        self._jobs.put_nowait(job)
        return await future


def _computed(clock: _Clock, work: Callable[[], Any]) -> Any:
    with clock.computing():
        return work()


def _passed_on(error: StopIteration) -> RuntimeError:
    """An exception that a future takes in place of one that it does not take."""
    stand_in = RuntimeError("a function raised StopIteration")
    stand_in.__cause__ = error
    return stand_in


def _raise(error: BaseException) -> None:
    raise error


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
