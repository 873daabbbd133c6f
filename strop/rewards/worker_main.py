"""The worker process of the reward pool: loads the reward functions and scores what comes down the pipe.

One sample, or all answers to a prompt, at a time. The loop waits for its parent only; it ends when the parent closes
the pipe. The parent kills it when a sample takes too long. When the parent dies, the kernel kills the whole process
group (Linux: a signal asked for on the life line, a pipe that only the parent holds open), and a thread that waits on
the same pipe does so on every other system.
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
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from strop.rewards.combine import Part, combine, combined_token_rewards
from strop.rewards.function_loading import load_functions
from strop.rewards.functions import BadReturnError, LoadError, RewardFunction, describe
from strop.rewards.outages import is_outage
from strop.rewards.outcome import Outcome
from strop.rewards.scorers import budget
from strop.rewards.wire import MAX_PARTS_BYTES
from strop.sandbox.config_handover import configure_shared
from strop.utils import deadline
from strop.utils.json_lines import decode, encode
from strop.utils.sanitize import usable
from strop.utils.sanitize.values import MAX_NUMBER

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
MAX_ERROR_CHARACTERS = 2000
"""Of the text of an exception, which may hold the whole answer."""


def _write(results: BinaryIO, message: list[Any]) -> None:
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
    """Event loop for functions that are coroutines."""
    import asyncio  # half of what a process would import otherwise

    return asyncio.new_event_loop()


def _resolve(returned: object) -> Any:
    """The returned value, awaited where it is a coroutine."""
    if not inspect.isawaitable(returned):
        return returned

    async def wait() -> Any:
        return await returned

    return _event_loop().run_until_complete(wait())


class _OutOfMemory(Exception):
    """Memory ran out, as the text says: what filled it may still be there, so the process should be replaced."""


def _call_guarded(function: RewardFunction, work: Callable[[], T]) -> T | Outcome:
    """Result of work with a function; an exception becomes an outcome.

    Raises:
        _OutOfMemory: the function has used it up.
    """
    label, ran_out = function.label, ""
    try:
        return work()
    except BadReturnError as error:
        return Outcome(kind="error", error=str(error))
    except MemoryError as error:
        ran_out = f"{label} ran out of memory: {_describe(error, function)}"
    except BaseException as error:  # noqa: BLE001 (the declared boundary: user code may raise anything)
        if is_outage(error):
            return Outcome(
                kind="infrastructure", error=f"{label} could not score: {_describe(error, function)}"
            )
        with contextlib.suppress(BaseException):  # an exception whose own text cannot be made
            traceback.print_exc()
        return Outcome(kind="error", error=f"{label} raised {_describe(error, function)}")
    raise _OutOfMemory(ran_out)  # here nothing holds what the function has filled


def _score_one(functions: Sequence[RewardFunction], arguments: Mapping[str, Any]) -> Outcome:
    """Call the functions one after the other; the first that fails decides.

    Raises:
        _OutOfMemory: as `_call_guarded`.
    """
    parts: list[Part] = []
    for function in functions:
        part = _call_guarded(function, partial(_read_one, function, arguments))
        if isinstance(part, Outcome):
            return part
        parts.append(part)
    return _combined(functions, parts, arguments)


def _score_all(
    functions: Sequence[RewardFunction], calls: Sequence[Mapping[str, Any]]
) -> Outcome | list[Outcome]:
    """The outcomes of all answers to a prompt, which functions that take groups get at once; a single one where such a
    function failed as a whole.

    Raises:
        _OutOfMemory: as `_call_guarded`.
    """
    group_parts: list[list[Part | BadReturnError] | None] = []
    for function in functions:
        if not function.takes_groups:
            group_parts.append(None)
            continue
        parts = _call_guarded(function, partial(_read_all, function, calls))
        if isinstance(parts, Outcome):
            return parts
        group_parts.append(parts)
    return [_outcome_in_group(functions, group_parts, index, call) for index, call in enumerate(calls)]


def _read_all(function: RewardFunction, calls: Sequence[Mapping[str, Any]]) -> list[Part | BadReturnError]:
    return function.read_all(_resolve(function.call_all(calls)), len(calls))


def _read_one(function: RewardFunction, call: Mapping[str, Any]) -> Part:
    return function.read(_resolve(function(call)))


def _outcome_in_group(
    functions: Sequence[RewardFunction],
    group_parts: Sequence[list[Part | BadReturnError] | None],
    index: int,
    call: Mapping[str, Any],
) -> Outcome:
    """The outcome of the answer at this index in its group. Functions that take no groups are called here."""
    parts: list[Part] = []
    for function, of_group in zip(functions, group_parts, strict=True):
        part: Part | BadReturnError | Outcome
        if of_group is None:
            part = _call_guarded(function, partial(_read_one, function, call))
        else:
            part = of_group[index]
        if isinstance(part, BadReturnError):
            return Outcome(kind="error", error=str(part))
        if isinstance(part, Outcome):
            return part
        parts.append(part)
    return _combined(functions, parts, call)


def _combined(
    functions: Sequence[RewardFunction], parts: Sequence[Part], arguments: Mapping[str, Any]
) -> Outcome:
    """The outcome of a sample that every function has scored."""
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
    return Outcome(kind="score", score=score, parts=merged, token_rewards=combined_token_rewards(parts))


def _describe(error: BaseException, function: RewardFunction) -> str:
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
            _write(results, list(message))

    deadline.listen(lambda at_most_s: tell("back") if at_most_s is None else tell("away", at_most_s))
    guard = budget.Guard(lambda comparison: tell("grading", comparison), timeout_s=setup["timeout_s"])
    prepared: set[str] = set()
    for line in commands:
        call, *hopeless = decode(line)
        source = str((call[0] if isinstance(call, list) else call)["data_source"])
        if source not in prepared:
            for function in functions:
                with contextlib.suppress(Exception):  # the call itself will say it, as this sample's error
                    function.prepare(source)
            prepared.add(source)
        tell("start")
        guard.begin(hopeless)
        budget.use(guard)
        started, is_spent = time.perf_counter(), False
        try:
            result = _score_all(functions, call) if isinstance(call, list) else _score_one(functions, call)
        except _OutOfMemory as error:
            result, is_spent = Outcome(kind="error", error=f"{error}{setup['memory_limit']}"), True
        if os.getpid() != own_pid:
            os._exit(0)
        seconds = time.perf_counter() - started
        if isinstance(result, list):
            outcomes = [[outcome.kind, outcome.score, outcome.parts, outcome.error] for outcome in result]
            tell("all", outcomes, seconds)
        else:
            tell("done", result.kind, result.score, result.parts, result.token_rewards, result.error, seconds)
        if is_spent or guard.has_interrupted:
            os._exit(0)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """True for a MemoryError, and for an error of the loader of libraries that means the same."""
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
    if (sandbox := setup["sections"].get("reward.sandbox")) is not None:
        configure_shared(sandbox)
    try:
        functions = load_functions(setup["functions"])
    except LoadError as error:
        limit = setup["memory_limit"] if _is_out_of_memory(error.__cause__) else ""
        _write(results, ["failed", f"{error}{limit}"])
        return
    wants_conversation = any(function.wants_conversation for function in functions)
    _write(results, ["ready", wants_conversation, any(function.takes_groups for function in functions)])
    try:
        _serve(commands, results, functions, setup)
    except BaseException:  # noqa: BLE001 (the pipes are gone; threads that a function left behind must not keep the process)
        traceback.print_exc()
        os._exit(1)
