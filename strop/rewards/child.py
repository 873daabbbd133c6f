"""The worker process of the reward pool: loads one reward function and scores what comes down the pipe.

One sample at a time. The loop waits for its parent only; it ends when the parent closes the pipe. The
parent kills it when a sample takes too long. When the parent dies, the kernel kills the whole process group
(Linux: a signal asked for on the life line, a pipe that only the parent holds open), and a thread that
waits on the same pipe does so on every other system.
"""

from __future__ import annotations

import asyncio
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from strop.rewards.functions import BadReturnError, LoadError, RewardFunction, describe, load_function
from strop.rewards.wire import MAX_PARTS_BYTES, decode, encode

_READ_BYTES = 1 << 16


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


def _make_caller(function: RewardFunction) -> Callable[[Mapping[str, Any]], Any]:
    loops: list[asyncio.AbstractEventLoop] = []

    def call(arguments: Mapping[str, Any]) -> Any:
        returned = function(arguments)
        if not inspect.isawaitable(returned):
            return returned
        if not loops:
            loops.append(asyncio.new_event_loop())

        async def wait() -> Any:
            return await returned

        return loops[0].run_until_complete(wait())

    return call


@dataclass
class _Result:
    score: float | None = None
    parts: dict[str, float | str | bool] = field(default_factory=dict)
    error: str = ""
    is_exhausted: bool = False
    """True when memory ran out: what filled it may still be there, so the process should be replaced."""


def _score_one(call: Callable[[], Any], function: RewardFunction, path: str) -> _Result:
    """Call the user's function; whatever it does becomes a result."""
    try:
        score, parts = function.read(call())
    except BadReturnError as error:
        return _Result(error=str(error))
    except MemoryError as error:
        return _Result(
            error=f"{function.label} ran out of memory: {describe(error, path)}", is_exhausted=True
        )
    except BaseException as error:  # noqa: BLE001 (the declared boundary: user code may raise anything)
        traceback.print_exc()
        return _Result(error=f"{function.label} raised {describe(error, path)}")
    if sum(len(str(part)) for part in parts.values()) > MAX_PARTS_BYTES:
        return _Result(error=f"{function.label} returned more than {MAX_PARTS_BYTES} bytes; return less text")
    return _Result(score=score, parts=parts)


def _serve(pipe: _Pipe, function: RewardFunction, path: str, memory_limit: str) -> bool:
    """Score until the parent closes the pipe; True when the process should be replaced before that."""
    call = _make_caller(function)
    prepared: set[str] = set()
    while (line := pipe.next_line()) is not None:
        number, arguments = decode(line)
        source = str(arguments["data_source"])
        if source not in prepared:
            pipe.flush()
            with contextlib.suppress(Exception):  # the call itself will say the same, as this sample's error
                function.prepare(source)
            prepared.add(source)
        pipe.put(["start", number])
        pipe.flush()
        started = time.perf_counter()
        result = _score_one(partial(call, arguments), function, path)
        seconds = time.perf_counter() - started
        error = result.error + memory_limit if result.is_exhausted else result.error
        pipe.put(["done", number, result.score, result.parts, error, seconds])
        if result.is_exhausted:
            pipe.flush()
            return True
    return False


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
    try:
        function = load_function(
            path=setup["path"], source=setup["source"], name=setup["name"], kwargs=setup["kwargs"]
        )
    except LoadError as error:
        pipe.put(["failed", str(error)])
        pipe.flush()
        return
    pipe.put(["ready", function.style])
    pipe.flush()
    if _serve(pipe, function, setup["path"], setup["memory_limit"]):
        os._exit(0)
