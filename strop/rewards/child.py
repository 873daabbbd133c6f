"""The worker process of the reward pool: loads the reward functions and scores what comes down the pipe.

One sample at a time. The loop waits for its parent only; it ends when the parent closes the pipe. The
parent kills it when a sample takes too long. When the parent dies, the kernel kills the whole process group
(Linux: a signal asked for on the life line, a pipe that only the parent holds open), and a thread that
waits on the same pipe does so on every other system.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import inspect
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strop.base.guests import joined
from strop.border import usable
from strop.border.values import MAX_NUMBER
from strop.rewards import budget, waiting
from strop.rewards.combining import Part, combine
from strop.rewards.functions import BadReturnError, LoadError, RewardFunction, describe, load_functions
from strop.rewards.outcome import OutcomeKind, RewardUnavailable, Value
from strop.rewards.wire import MAX_PARTS_BYTES, decode, encode

if TYPE_CHECKING:
    import asyncio

_READ_BYTES = 1 << 16
MAX_ERROR_CHARACTERS = 2000
"""Of the text of an exception, which may hold the whole answer."""
_NOT_THE_ANSWER = (RewardUnavailable, ConnectionError)
"""Exceptions that say that something scoring needs is not there."""


class _Pipe:
    """Lines from one pipe, lines into another; what is written waits until the next flush."""

    def __init__(self, commands_fd: int, results_fd: int) -> None:
        self._commands_fd = commands_fd
        self._results_fd = results_fd
        self._input = bytearray()
        self._output = bytearray()

    def next_line(self) -> bytes | None:
        """The next line, or None at the end. Flushes before it waits, so no result is ever held back."""
        while (end := self._input.find(b"\n")) < 0:
            self.flush()
            data = os.read(self._commands_fd, _READ_BYTES)
            if not data:
                return None
            self._input += data
        line = bytes(self._input[:end])
        del self._input[: end + 1]
        return line

    def put(self, message: list[Any]) -> None:
        self._output += encode(message)

    def flush(self) -> None:
        while self._output:
            del self._output[: os.write(self._results_fd, self._output)]


def _die_with_parent(life_fd: int) -> None:
    if sys.platform == "linux":
        # The kernel signals the process group when the other end closes, also while C code runs.
        fcntl.fcntl(life_fd, fcntl.F_SETOWN, -os.getpgid(0))
        fcntl.fcntl(life_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)

    def wait() -> None:
        os.read(life_fd, 1)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait, name="life-line", daemon=True).start()


def _limit_resources(max_memory_bytes: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if max_memory_bytes is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or max_memory_bytes <= hard:
            resource.setrlimit(resource.RLIMIT_DATA, (max_memory_bytes, hard))


class _Caller:
    """Calls reward functions, and waits for those that are coroutines in one event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, function: RewardFunction, arguments: Mapping[str, Any]) -> Any:
        returned = function(arguments)
        if not inspect.isawaitable(returned):
            return returned
        if self._loop is None:
            import asyncio  # half of what a process would import otherwise

            self._loop = asyncio.new_event_loop()

        async def wait() -> Any:
            return await returned

        return self._loop.run_until_complete(wait())


@dataclass
class _Result:
    score: float | None = None
    parts: dict[str, Value] = field(default_factory=dict)
    error: str = ""
    kind: OutcomeKind = "error"
    is_exhausted: bool = False
    """True when memory ran out: what filled it may still be there, so the process should be replaced."""


def _score_one(call: _Caller, functions: Sequence[RewardFunction], arguments: Mapping[str, Any]) -> _Result:
    """Call the functions one after the other; the first that fails decides."""
    parts: list[Part] = []
    for function in functions:
        part = _call(call, function, arguments)
        if isinstance(part, _Result):
            return part
        parts.append(part)
    score, merged = combine(parts)
    label = functions[0].label if len(functions) == 1 else f"all {len(functions)} reward functions"
    if score is None:
        return _Result(
            error=f"{label} returned None, which is TRL's word for not applicable, so this sample has no reward; "
            f"return a number for every row of data_source {arguments['data_source']!r}"
        )
    if usable(score) is None:
        return _Result(
            error=f"the weighted sum of the reward functions is {score}, beyond {MAX_NUMBER:g}; return smaller numbers"
        )
    if sum(len(str(part)) for part in merged.values()) > MAX_PARTS_BYTES:
        return _Result(error=f"{label} returned more than {MAX_PARTS_BYTES} bytes; return less text")
    return _Result(kind="score", score=score, parts=merged)


def _call(call: _Caller, function: RewardFunction, arguments: Mapping[str, Any]) -> Part | _Result:
    """Call one of the user's functions; whatever it does becomes a result."""
    try:
        return function.read(call(function, arguments))
    except BadReturnError as error:
        return _Result(error=str(error))
    except MemoryError as error:
        return _Result(
            error=f"{function.label} ran out of memory: {_described(error, function)}", is_exhausted=True
        )
    except _NOT_THE_ANSWER as error:
        return _Result(
            error=f"{function.label} could not score: {_described(error, function)}", kind="infrastructure"
        )
    except BaseException as error:  # noqa: BLE001 (the declared boundary: user code may raise anything)
        with contextlib.suppress(BaseException):  # an exception whose own text cannot be made
            traceback.print_exc()
        return _Result(error=f"{function.label} raised {_described(error, function)}")


def _described(error: BaseException, function: RewardFunction) -> str:
    try:
        return describe(error, function.path)[:MAX_ERROR_CHARACTERS]
    except BaseException:  # noqa: BLE001 (the text of the exception is the user's code as well)
        return f"{type(error).__name__}, whose text cannot be shown"


def _serve(pipe: _Pipe, functions: Sequence[RewardFunction], setup: Mapping[str, Any]) -> bool:
    """Score until the parent closes the pipe; True when the process should be replaced before that."""
    call = _Caller()

    def tell(comparison: int | None) -> None:
        pipe.put(["grading", number, comparison])
        pipe.flush()

    def tell_away(at_most_s: float | None) -> None:
        if os.getpid() == own_pid:
            pipe.put(["back", number] if at_most_s is None else ["away", number, at_most_s])
            pipe.flush()

    number = -1
    own_pid = os.getpid()
    waiting.listen(tell_away)
    guard = budget.Guard(tell, timeout_s=setup["timeout_s"])
    prepared: set[str] = set()
    while (line := pipe.next_line()) is not None:
        number, arguments, *hopeless = decode(line)
        source = str(arguments["data_source"])
        if source not in prepared:
            pipe.flush()
            for function in functions:
                with contextlib.suppress(Exception):  # the call itself will say it, as this sample's error
                    function.prepare(source)
            prepared.add(source)
        pipe.put(["start", number])
        pipe.flush()
        guard.begin(hopeless)
        budget.use(guard)
        started = time.perf_counter()
        result = _score_one(call, functions, arguments)
        if os.getpid() != own_pid:  # the function forked, and this is the copy: the pipes are not for it
            os._exit(0)
        seconds = time.perf_counter() - started
        error = result.error + setup["memory_limit"] if result.is_exhausted else result.error
        pipe.put(["done", number, result.kind, result.score, result.parts, error, seconds])
        if result.is_exhausted or guard.has_interrupted:
            pipe.flush()
            return True
    return False


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Also where the loader of a library says so."""
    return isinstance(error, MemoryError) or "failed to map segment" in str(error)


def main(commands_fd: int, results_fd: int, life_fd: int) -> None:
    """Entry point of the process; the first line on the pipe says what to load."""
    for fd in (commands_fd, results_fd, life_fd):
        os.set_inheritable(fd, False)
    _die_with_parent(life_fd)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    pipe = _Pipe(commands_fd, results_fd)
    first = pipe.next_line()
    if first is None:
        return
    (setup,) = decode(first)
    _limit_resources(setup["max_memory_bytes"])
    for section, data in setup["sections"].items():
        joined("reward worker", section)(data)
    try:
        functions = load_functions(setup["functions"])
    except LoadError as error:
        limit = setup["memory_limit"] if _is_out_of_memory(error.__cause__) else ""
        pipe.put(["failed", f"{error}{limit}"])
        pipe.flush()
        return
    styles = [function.style for function in functions]
    # What is sent for a manager has all that TRL's functions take, and that has all that others take.
    pipe.put(["ready", next((style for style in ("manager", "trl") if style in styles), styles[0])])
    pipe.flush()
    try:
        is_exhausted = _serve(pipe, functions, setup)
    except BaseException:  # noqa: BLE001 (the pipes are gone; threads that a function left behind must not keep the process)
        traceback.print_exc()
        os._exit(1)
    if is_exhausted:
        os._exit(0)
