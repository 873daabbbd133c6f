"""The reward functions of a run in worker processes: one call per answer, or per group where a function takes lists,
in a thread that owns the processes.

It has its own thread so that deadlines hold, and results are taken, while the caller's event loop is busy with a
training step. Its event loop has a task for each worker, which keeps one process after the other
(worker_process.py), takes calls from one queue, and gives their outcomes to the futures that callers wait for. Each
future is resolved: with a score, an error or a timeout, and where the pool stops with the reason.

A process works on one call at a time, in the order in which it got them, and says when it starts one; with functions
that are coroutines, on reward.max_concurrent of them (concurrent_calls.py). The deadline of a call
stands still while the call is where other limits hold, as in a sandbox (strop.utils.deadline). Calls queued behind one
that times out or ends its process go back to where they were in the queue. So do those that were under way together
with it; each of them is then scored alone, which says whose doing it was.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards.concurrent_calls import Call, CallResult, ConcurrentCalls, Expired
from strop.rewards.config import RewardConfig
from strop.rewards.group_scoring import score_answers
from strop.rewards.outcome import Outcome, RewardError
from strop.rewards.stdout_capture import OutputLog
from strop.rewards.wire import call_of, refusal
from strop.rewards.worker_process import REAP_S, WorkerProcess, death_sentence
from strop.rewards.worker_setup import check_sources, function_setups, functions_label, process_setup
from strop.utils.json_lines import decode, encode

log = logging.getLogger(__name__)

_CLOSE_S = 10.0
"""Limit for ending the worker processes, in seconds; they are killed after a tenth of it."""
_AHEAD_S = 0.02
"""Work handed to a worker ahead of time, in seconds: enough to hide the way there and back, little enough
that no call waits long behind a slow one while another worker is free."""
_MAX_AHEAD = 64
_LATE_S = 0.05
"""For what has come by the end of a time limit, and was not read yet, in seconds."""
_MAX_LEFT_OUT = 3
"""Comparisons of one sample that are left out, after which its deaths are errors."""
_MAX_IDLE_DEATHS = 3
"""Deaths in a row without one finished call, after which the calls that wait are given up."""
_DEATH_REMEDY = "see to what the reward file does as it is loaded: what it imports, and the memory that takes"
_BUDGET_SIGNALS = {-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS}
"""Ends of a process whose comparison needs more computing or stack than there is."""


class Workers:
    """Processes that call reward functions; `start` and `close` around it."""

    def __init__(
        self, config: RewardConfig, *, tokenizer: str, log_file: Path | None, shows: bool = True
    ) -> None:
        """Args:
        config: of the reward.
        tokenizer: folder of the policy's tokenizer, which a reward manager is given.
        log_file: for what the functions print; None keeps only what is shown.
        shows: the first lines that they print.
        """
        self._config, self._tokenizer, self._label = config, tokenizer, functions_label(config)
        self._log_file, self._shows = log_file, shows
        self._calls: asyncio.PriorityQueue[Call] = asyncio.PriorityQueue()
        self._numbers = itertools.count()
        self._incoming: list[Call] = []
        self._done: list[tuple[asyncio.Future[CallResult], CallResult]] = []
        self._processes: set[WorkerProcess] = set()
        self._lock = threading.Lock()
        self._stopped = "the reward pool was closed"
        self._mean_s = _AHEAD_S
        self._idle_deaths, self._last_death = 0, ""
        self._has_given_up = False
        self.takes_groups = False
        """A function is called once for all answers to a prompt (`score_group`); known from the start on."""

    def check_files(self) -> None:
        """Refuse files that are missing or no Python, before anything is started.

        Raises:
            RewardError: the sentence names the file.
        """
        check_sources(function_setups(self._config, self._tokenizer))

    async def start(self) -> None:
        """Start the processes and load the functions in each.

        Raises:
            RewardError: a file is missing, cannot be imported, or has no such function.
        """
        functions = function_setups(self._config, self._tokenizer)
        self._paths = {function["path"] for function in functions} - {""}
        self._setup = encode([process_setup(self._config, functions)])
        self._printed = OutputLog(self._log_file, shows=self._shows)
        self._loaded: set[int] = set()
        self._ready: concurrent.futures.Future[tuple[bool, bool]] = concurrent.futures.Future()
        self._stopped = ""
        self._loop = asyncio.new_event_loop()
        self._keeping = self._loop.create_task(self._keep())
        self._thread = threading.Thread(target=self._run, name="reward-workers", daemon=True)
        self._thread.start()
        self._wants_conversation, self.takes_groups = await asyncio.wrap_future(self._ready)

    async def close(self) -> None:
        """End the processes. What is still being scored gets an outcome without a score."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = "the reward pool was closed"
            self._loop.call_soon_threadsafe(self._keeping.cancel)
        await asyncio.to_thread(self._thread.join, _CLOSE_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the reward workers did not end within {_CLOSE_S:g} s of being killed")

    async def score(self, prompt: Prompt, trajectory: Trajectory, text: str) -> Outcome:
        """Score an answer with all functions; arguments as `call_of`."""
        call = self._call_of(prompt, trajectory, text)
        if isinstance(call, Outcome):
            return call
        outcome = await self._submit(call, num_answers=1)
        assert isinstance(outcome, Outcome), "a call of one answer has one outcome"
        return outcome

    async def score_group(self, prompt: Prompt, answers: Sequence[tuple[Trajectory, str]]) -> list[Outcome]:
        """Score all answers to a prompt; functions that take lists get them at once (group_scoring.py)."""
        calls = [self._call_of(prompt, trajectory, text) for trajectory, text in answers]
        outcomes = {index: call for index, call in enumerate(calls) if isinstance(call, Outcome)}
        sent = {index: call for index, call in enumerate(calls) if not isinstance(call, Outcome)}
        outcomes |= await score_answers(sent, self._submit_group)
        return [outcomes[index] for index in range(len(calls))]

    def _call_of(self, prompt: Prompt, trajectory: Trajectory, text: str) -> dict[str, Any] | Outcome:
        """The call to send for an answer; an error outcome where it cannot be encoded."""
        call = call_of(prompt, trajectory, text, wants_conversation=self._wants_conversation)
        try:
            encode([call])
        except (TypeError, ValueError) as error:
            return Outcome(kind="error", error=refusal(call, prompt.row, error), remedy="")
        return call

    async def _submit_group(self, calls: Sequence[Mapping[str, Any]]) -> CallResult:
        return await self._submit([*calls], num_answers=len(calls))

    async def _submit(
        self, call: Mapping[str, Any] | list[Mapping[str, Any]], *, num_answers: int
    ) -> CallResult:
        future: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._stopped:
                return _unscored(self._stopped)
            self._incoming.append(
                Call(number=next(self._numbers), line=encode([call]), future=future, num_answers=num_answers)
            )
            if len(self._incoming) == 1:
                self._loop.call_soon_threadsafe(self._enqueue_incoming)
        return await future

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._keeping)
        finally:
            self._loop.close()

    async def _keep(self) -> None:
        """Keep the processes until the pool is closed, or they cannot be had."""
        reason = "the reward pool failed; see the log"
        try:
            async with asyncio.TaskGroup() as group:
                for worker in range(self._config.num_workers):
                    group.create_task(self._run_worker(worker))
        except asyncio.CancelledError:
            reason = self._stopped
        except ExceptionGroup as errors:
            error = errors.exceptions[0]
            if isinstance(error, OSError):
                reason = f"a reward worker could not be started: {error}; lower reward.num_workers or free resources"
            if isinstance(error, RewardError):
                reason = str(error)
            else:
                log.error("reward workers stopped", exc_info=error)
        finally:
            with self._lock:
                self._stopped = self._stopped or reason
            processes, self._processes = self._processes, set()
            await asyncio.gather(
                *(process.end(wait_s=0.0 if process.since else REAP_S) for process in processes)
            )
            if not self._ready.done():
                self._ready.set_exception(RewardError(reason))
            self._enqueue_incoming()
            self._resolve_waiting(reason)
            self._deliver()
            self._printed.close()

    def _enqueue_incoming(self) -> None:
        with self._lock:
            incoming, self._incoming = self._incoming, []
        for call in incoming:
            self._calls.put_nowait(call)

    async def _run_worker(self, worker: int) -> None:
        """Score calls from the queue with one process after the other.

        Raises:
            OSError: no process can be started.
            RewardError: the functions cannot be loaded, at the start of the pool.
        """
        while True:
            if self._has_given_up:  # until there is something to score
                self._calls.put_nowait(await self._calls.get())
                self._has_given_up = False
            process = WorkerProcess(self._config, self._paths, self._printed)
            self._processes.add(process)
            calls: deque[Call] = deque()
            death, may_recover = "", False
            try:
                await process.connect()
                await self._load(worker, process)
                if process.runs_coroutines:
                    await self._score_concurrently(process, calls)
                while True:
                    await self._score_next(process, calls)
            except TimeoutError:
                death = await self._on_timeout(process, calls)
            except RewardError as error:
                death = str(error)
            except (EOFError, ValueError) as error:
                if isinstance(error, ValueError):
                    log.warning("a reward worker wrote something unexpected and is replaced: %s", error)
                status = await process.end(wait_s=REAP_S)
                death, may_recover = self._on_death(process, calls, status), status == -signal.SIGKILL
            finally:
                for call in calls:
                    self._calls.put_nowait(call)
            await process.end(wait_s=0.0)
            self._processes.remove(process)
            if death:
                self._count_death(death, may_recover=may_recover)

    async def _load(self, worker: int, process: WorkerProcess) -> None:
        capabilities = await process.load(self._setup)
        self._loaded.add(worker)
        if len(self._loaded) == self._config.num_workers and not self._ready.done():
            self._ready.set_result(capabilities)

    async def _score_next(self, process: WorkerProcess, calls: deque[Call]) -> None:
        """Have the process score the next calls, which are left in `calls` until they have an outcome."""
        calls.append(await self._calls.get())
        if process.has_ended():
            self._calls.put_nowait(calls.pop())
            raise EOFError
        fair = (
            self._calls.qsize() // self._config.num_workers
        )  # the next ones may take longer than those before
        ahead = min(_MAX_AHEAD, int(_AHEAD_S / max(self._mean_s, 1e-6)) - 1, fair)
        calls.extend(self._calls.get_nowait() for _ in range(ahead))
        for call in [call for call in calls if call.future.cancelled()]:
            calls.remove(call)
        process.send(b"".join(call.line for call in calls))
        while calls:
            result = await process.score(calls[0].num_answers)
            self._finish(calls.popleft(), result)
            outcomes = [result] if isinstance(result, Outcome) else result
            seconds = sum(outcome.seconds for outcome in outcomes)
            self._mean_s += 0.1 * (seconds - self._mean_s)

    async def _score_concurrently(self, process: WorkerProcess, calls: deque[Call]) -> None:
        """Have the process score calls, several at the same time, until it ends. Left in `calls` is the one that ended
        it, where that is known; those that may have are scored again, each alone.

        Raises:
            TimeoutError, EOFError, ValueError: as `WorkerProcess.score`.
        """
        under_way = ConcurrentCalls(process, self._config)
        waiting: set[asyncio.Task[Any]] = set()
        getting: asyncio.Task[Call] | None = None
        hearing: asyncio.Task[list[Any]] | None = None
        next_call: Call | None = None
        try:
            while True:
                if next_call is None and getting is None and under_way.has_room():
                    getting = self._loop.create_task(self._calls.get())
                hearing = hearing or self._loop.create_task(process.message())
                waiting = {hearing} if getting is None else {hearing, getting}
                done, _ = await asyncio.wait(
                    waiting, timeout=under_way.left_s(), return_when=asyncio.FIRST_COMPLETED
                )
                if not done and not (await asyncio.wait(waiting, timeout=_LATE_S))[0]:
                    raise TimeoutError
                if getting is not None and getting.done():
                    next_call, getting = getting.result(), None
                if hearing.done():
                    messages, hearing = [hearing.result(), *process.messages_at_hand()], None
                    for finished in filter(None, map(under_way.hear, messages)):
                        call, result = finished
                        if isinstance(result, Expired):
                            result = self._timed_out(call, result.seconds, result.location)
                        self._finish(call, result)
                if next_call is not None and next_call.future.cancelled():
                    next_call = None
                if next_call is not None and under_way.has_room(next_call):
                    if process.has_ended():
                        raise EOFError
                    under_way.send(next_call)
                    next_call = None
        finally:
            for task in waiting:
                task.cancel()
            if getting is not None and getting.done() and not getting.cancelled():
                next_call = getting.result()
            for call in (*under_way.leave(calls), *([] if next_call is None else [next_call])):
                self._calls.put_nowait(call)

    def _finish(self, call: Call, result: CallResult) -> None:
        self._resolve(call, result)
        self._idle_deaths, self._last_death = 0, ""

    async def _on_timeout(self, process: WorkerProcess, calls: deque[Call]) -> str:
        """Resolve a call that exceeded its limit with a timeout. Returns a sentence about a process that did not get
        as far as a call, else an empty text."""
        since = process.since
        if since is None and (process.gave_back or process.calls_done):
            return ""
        location = await process.ask_location()
        if since is None:
            limit = f"within {self._config.start_timeout_s:g} s (reward.start_timeout_s)"
            return f"{self._label} could not be loaded {limit}: its imports hang{location}"
        call = calls.popleft()
        self._resolve(call, self._timed_out(call, time.monotonic() - since, location))
        return ""

    def _timed_out(self, call: Call, seconds: float, location: str) -> Outcome:
        num_answers = call.num_answers
        each = f", for each of {num_answers} answers" if num_answers > 1 else ""
        limit = f"{self._config.timeout_s * num_answers:g} s (reward.timeout_s{each})"
        sentence = f"{self._label} did not finish in {limit}{location}"
        return Outcome(kind="timeout", seconds=seconds, error=sentence)

    def _on_death(self, process: WorkerProcess, calls: deque[Call], status: int) -> str:
        """Handle a process that has ended, with the same result as `_on_timeout`."""
        sentence = f"the worker process {death_sentence(status)}"
        location = process.location()
        if process.since is not None:
            call = calls.popleft()
            message = decode(call.line)
            if status in _BUDGET_SIGNALS and process.grading is not None and len(message) <= _MAX_LEFT_OUT:
                calls.appendleft(replace(call, line=encode([*message, process.grading])))
            else:
                seconds = time.monotonic() - process.since
                error = f"{sentence} in {self._label}{location}"
                self._resolve(call, Outcome(kind="error", seconds=seconds, error=error))
            return ""
        if process.gave_back or (process.calls_done and (not calls or status == 0)):
            return ""
        action = "preparing to score with" if process.is_loaded else "loading"
        return f"{sentence} while {action} {self._label}{location}"

    def _count_death(self, death: str, *, may_recover: bool) -> None:
        """Count a process that has ended before it scored a call.

        Args:
            death: a sentence.
            may_recover: another process may live longer.

        Raises:
            RewardError: the pool does not get started.
        """
        self._idle_deaths += 1
        self._last_death = self._last_death or death
        is_hopeless = self._idle_deaths >= _MAX_IDLE_DEATHS
        if not self._ready.done() and (is_hopeless or not may_recover):
            raise RewardError(self._last_death)
        if is_hopeless:
            sentence = f"reward workers die before they score anything: {self._last_death}"
            self._resolve_waiting(sentence, remedy=_DEATH_REMEDY)
            self._has_given_up, self._idle_deaths, self._last_death = True, 0, ""

    def _resolve_waiting(self, reason: str, *, remedy: str = "") -> None:
        """Resolve the waiting calls without a score."""
        while not self._calls.empty():
            self._resolve(self._calls.get_nowait(), _unscored(reason, remedy=remedy))

    def _resolve(self, call: Call, outcome: CallResult) -> None:
        """Hand an outcome to the caller, together with all that come before this thread waits again."""
        if not self._done:
            self._loop.call_soon(self._deliver)
        self._done.append((call.future, outcome))

    def _deliver(self) -> None:
        done, self._done = self._done, []
        for loop in {future.get_loop() for future, _ in done}:
            of_loop = [pair for pair in done if pair[0].get_loop() is loop]
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(_set_results, of_loop)


def _unscored(reason: str, *, remedy: str = "") -> Outcome:
    return Outcome(kind="infrastructure", error=f"not scored: {reason}", remedy=remedy)


def _set_results(done: Sequence[tuple[asyncio.Future[CallResult], CallResult]]) -> None:
    for future, outcome in done:
        if not future.done():
            future.set_result(outcome)
