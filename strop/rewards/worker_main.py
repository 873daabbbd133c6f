"""The worker process of the reward pool: loads the reward functions and scores what comes down the pipe.

One sample, or all answers to a prompt, at a time; several, where a function is a coroutine (worker_coroutines.py). The
loop waits for its parent only; it ends when the parent closes the pipe. The parent kills it when a sample takes too
long. When the parent dies, the kernel kills the whole process group (Linux: a signal asked for on the life line, a pipe
that only the parent holds open), and a thread that waits on the same pipe does so on every other system.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from strop.rewards.function_loading import load_functions
from strop.rewards.functions import LoadError
from strop.rewards.outcome import Outcome
from strop.rewards.scorers import budget
from strop.rewards.worker_scoring import (
    OutOfMemory,
    Scoring,
    invoke_now,
    prepare,
    result_message,
    run_now,
    source_of,
)
from strop.sandbox.config_handover import configure_shared
from strop.utils import deadline
from strop.utils.json_lines import decode, encode

Tell = Callable[..., None]


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


def _teller(results: BinaryIO) -> Tell:
    """Writes messages to the parent, but not from a copy that a function has forked: the pipes are not for it."""
    own_pid = os.getpid()

    def tell(*message: Any) -> None:
        if os.getpid() == own_pid:
            _write(results, list(message))

    return tell


def _serve(commands: BinaryIO, tell: Tell, scoring: Scoring, setup: Mapping[str, Any]) -> None:
    """Score one call at a time, until the parent closes the pipe or the process should be replaced."""
    own_pid = os.getpid()
    deadline.listen(lambda at_most_s: tell("back") if at_most_s is None else tell("away", at_most_s))
    guard = budget.Guard(lambda comparison: tell("grading", comparison), timeout_s=setup["timeout_s"])
    prepared: set[str] = set()
    for line in commands:
        call, *hopeless = decode(line)
        if (source := source_of(call)) not in prepared:
            prepare(scoring.functions, source)
            prepared.add(source)
        tell("start")
        guard.begin(hopeless)
        budget.use(guard)
        started, is_spent = time.perf_counter(), False
        try:
            result = run_now(scoring.score(call))
        except OutOfMemory as error:
            result, is_spent = Outcome(kind="error", error=f"{error}{setup['memory_limit']}"), True
        if os.getpid() != own_pid:
            os._exit(0)
        tell(*result_message(result, time.perf_counter() - started))
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
    coroutines = any(function.is_coroutine for function in functions)
    wants_conversation = any(function.wants_conversation for function in functions)
    takes_groups = any(function.takes_groups for function in functions)
    tell = _teller(results)
    tell("ready", wants_conversation, takes_groups, coroutines)
    try:
        if coroutines:
            from strop.rewards.worker_coroutines import Serving  # asyncio: half of what is imported otherwise

            Serving(commands, tell, functions, setup).run()
        else:
            _serve(commands, tell, Scoring(functions, invoke_now), setup)
    except BaseException:  # noqa: BLE001 (the pipes are gone; threads that a function left behind must not keep the process)
        traceback.print_exc()
        os._exit(1)
