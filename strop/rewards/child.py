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
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO

from strop.base.guests import joined, optional
from strop.border import usable
from strop.border.values import MAX_NUMBER
from strop.rewards import waiting
from strop.rewards.combining import Part, combine
from strop.rewards.functions import BadReturnError, LoadError, RewardFunction, describe, load_functions
from strop.rewards.outcome import Outcome, RewardUnavailable
from strop.rewards.wire import MAX_PARTS_BYTES, decode, encode

if TYPE_CHECKING:
    import asyncio

MAX_ERROR_CHARACTERS = 2000
"""Of the text of an exception, which may hold the whole answer."""
_NOT_THE_ANSWER = (RewardUnavailable, ConnectionError)
"""Exceptions that say that something scoring needs is not there."""


def _say(results: BinaryIO, message: list[Any]) -> None:
    results.write(encode(message))
    results.flush()


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


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """For functions that are coroutines."""
    import asyncio  # half of what a process would import otherwise

    return asyncio.new_event_loop()


def _awaited(returned: Any) -> Any:
    """What a function returned, or what the coroutine gives that it returned."""
    if not inspect.isawaitable(returned):
        return returned

    async def wait() -> Any:
        return await returned

    return _event_loop().run_until_complete(wait())


class _OutOfMemory(Exception):
    """Memory ran out, as the text says: what filled it may still be there, so the process should be replaced."""


def _score_one(functions: Sequence[RewardFunction], arguments: Mapping[str, Any]) -> Outcome:
    """Call the functions one after the other; the first that fails decides, and whatever it does becomes an outcome.

    Raises:
        _OutOfMemory: a function has used it up.
    """
    parts: list[Part] = []
    for function in functions:
        label, ran_out = function.label, ""
        try:
            parts.append(function.read(_awaited(function(arguments))))
        except BadReturnError as error:
            return Outcome(kind="error", error=str(error))
        except MemoryError as error:
            ran_out = f"{label} ran out of memory: {_described(error, function)}"
        except _NOT_THE_ANSWER as error:
            sentence = f"{label} could not score: {_described(error, function)}"
            return Outcome(kind="infrastructure", error=sentence)
        except BaseException as error:  # noqa: BLE001 (the declared boundary: user code may raise anything)
            with contextlib.suppress(BaseException):  # an exception whose own text cannot be made
                traceback.print_exc()
            return Outcome(kind="error", error=f"{label} raised {_described(error, function)}")
        if ran_out:  # here nothing holds what the function has filled
            raise _OutOfMemory(ran_out)
    score, merged = combine(parts)
    label = functions[0].label if len(functions) == 1 else f"all {len(functions)} reward functions"
    if score is None:
        return Outcome(
            kind="error",
            error=f"{label} returned None, which is TRL's word for not applicable, so this sample has no reward; "
            f"return a number for every row of data_source {arguments['data_source']!r}",
        )
    if usable(score) is None:
        return Outcome(
            kind="error",
            error=f"the weighted sum of the reward functions is {score}, beyond {MAX_NUMBER:g}; return smaller numbers",
        )
    if sum(len(str(part)) for part in merged.values()) > MAX_PARTS_BYTES:
        return Outcome(
            kind="error", error=f"{label} returned more than {MAX_PARTS_BYTES} bytes; return less text"
        )
    return Outcome(kind="score", score=score, parts=merged)


def _described(error: BaseException, function: RewardFunction) -> str:
    try:
        return describe(error, function.path)[:MAX_ERROR_CHARACTERS]
    except BaseException:  # noqa: BLE001 (the text of the exception is the user's code as well)
        return f"{type(error).__name__}, whose text cannot be shown"


def _serve(
    commands: BinaryIO, results: BinaryIO, functions: Sequence[RewardFunction], setup: Mapping[str, Any]
) -> None:
    """Score until the parent closes the pipe, or the process should be replaced."""
    own_pid = os.getpid()

    def tell(*message: Any) -> None:
        if os.getpid() == own_pid:  # the pipes are not for a copy that a function has forked
            _say(results, list(message))

    waiting.listen(lambda at_most_s: tell("back") if at_most_s is None else tell("away", at_most_s))
    limits = optional("limits of graders")
    guard = limits and limits.Guard(
        lambda comparison: tell("grading", comparison), timeout_s=setup["timeout_s"]
    )
    prepared: set[str] = set()
    for line in commands:
        arguments, *hopeless = decode(line)
        source = str(arguments["data_source"])
        if source not in prepared:
            for function in functions:
                with contextlib.suppress(Exception):  # the call itself will say it, as this sample's error
                    function.prepare(source)
            prepared.add(source)
        tell("start")
        if guard is not None:
            guard.begin(hopeless)
            limits.use(guard)
        started, is_spent = time.perf_counter(), False
        try:
            made = _score_one(functions, arguments)
        except _OutOfMemory as error:
            made, is_spent = Outcome(kind="error", error=f"{error}{setup['memory_limit']}"), True
        if os.getpid() != own_pid:
            os._exit(0)
        tell("done", made.kind, made.score, made.parts, made.error, time.perf_counter() - started)
        if is_spent or (guard is not None and guard.has_interrupted):
            os._exit(0)


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
    commands, results = os.fdopen(commands_fd, "rb"), os.fdopen(results_fd, "wb")
    first = commands.readline()
    if not first:
        return
    (setup,) = decode(first)
    _limit_resources(setup["max_memory_bytes"])
    for section, data in setup["sections"].items():
        joined("reward worker", section)(data)
    try:
        functions = load_functions(setup["functions"])
    except LoadError as error:
        limit = setup["memory_limit"] if _is_out_of_memory(error.__cause__) else ""
        _say(results, ["failed", f"{error}{limit}"])
        return
    _say(results, ["ready", any(function.wants_conversation for function in functions)])
    try:
        _serve(commands, results, functions, setup)
    except BaseException:  # noqa: BLE001 (the pipes are gone; threads that a function left behind must not keep the process)
        traceback.print_exc()
        os._exit(1)
