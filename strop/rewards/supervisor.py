"""The thread that owns the worker processes of a reward pool and every deadline on them.

It has its own thread so that deadlines hold, and results are taken, while the caller's event loop is busy
with a training step. It waits in one place, on: the workers' pipes, the wake-up pipe (a new call, or stop),
and the nearest deadline. Callers wait for a future that this thread always resolves: with a score, an error
or a timeout, and with an error when the pool stops.

A call's deadline stands still while it is where other limits hold, as in a sandbox (waiting.py).

A worker works on one call at a time, in the order in which it got them, and says when it starts one. What is
queued behind a call that times out or kills its worker goes back to the front of the line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import threading
import time
from collections import deque
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from strop.rewards.calls import Call, deliver, unscored
from strop.rewards.outcome import Outcome, RewardError
from strop.rewards.printed import Printed
from strop.rewards.wire import decode, outcome_of
from strop.rewards.worker import REAP_S, Launch, WorkerProcess, death_sentence

log = logging.getLogger(__name__)

_QUEUE_S = 0.02
"""Work handed to a worker ahead of time, in seconds: enough to hide the way there and back, little enough
that no call waits long behind a slow one while another worker is free."""
_MAX_QUEUE = 64
_CHECK_S = 0.5
"""How often the processes are looked at, should a pipe not tell that one is gone, in seconds."""
_DUMP_S = 0.15
"""Time a hanging worker gets to write where it hangs, in seconds."""
_OVERTAXED = {-signal.SIGXCPU, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS}
"""Ends of a process whose comparison needs more computing or stack than there is."""
_MAX_IDLE_DEATHS = 3
"""Deaths in a row without one finished call, after which the calls that wait are given up."""


class Supervisor:
    """Runs the workers in a thread of its own."""

    def __init__(
        self,
        launch: Launch,
        *,
        num_workers: int,
        label: str,
        log_file: Path | None = None,
    ) -> None:
        self.ready: Future[str] = Future()
        """The calling convention of the loaded function; or RewardError when it cannot be loaded."""
        self._launch = launch
        self._printed = Printed(log_file)
        self._num_workers = num_workers
        self._label = label
        self._lock = threading.Lock()
        self._incoming: list[Call] = []
        self._stopped = ""
        self._waiting: deque[Call] = deque()
        self._done: list[tuple[Call, Outcome]] = []
        self._workers: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._mean_s = _QUEUE_S
        self._idle_deaths = 0
        self._last_death = ""
        self._was_killed = False  # the last one that died idle; others do so of themselves, and will again
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, name="reward-supervisor", daemon=True)

    # --- called from any thread ---

    def start(self) -> None:
        self._thread.start()

    def submit(self, call: Call) -> None:
        """Queue a call; its future is always resolved."""
        with self._lock:
            reason = self._stopped
            if not reason:
                self._incoming.append(call)
                if len(self._incoming) == 1:
                    self._wake()
        if reason:
            deliver([(call, unscored(reason))])

    def stop(self, reason: str) -> None:
        """End the workers; what is still waiting gets an error outcome with the reason. Returns at once."""
        with self._lock:
            self._stopped = self._stopped or reason
            self._wake()

    def join(self, timeout_s: float) -> bool:
        """Wait until all processes are gone; False when that took longer."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _wake(self) -> None:
        """Called with the lock held, so that the pipe is not closed meanwhile."""
        if self._wake_write >= 0:
            with contextlib.suppress(BlockingIOError):  # full: a wake-up is on its way already
                os.write(self._wake_write, b"w")

    # --- the thread ---

    def _run(self) -> None:
        reason = "the reward pool failed; see the log"
        try:
            self._selector.register(self._wake_read, selectors.EVENT_READ, self._on_wake)
            for _ in range(self._num_workers):
                self._spawn()
            while not self._stopped:
                for key, mask in self._selector.select(self._wait_s()):
                    key.data(mask)
                self._check_deadlines()
                self._replace_dead()
                self._dispatch()
                deliver(self._done)
                self._done = []
            reason = self._stopped
        except OSError as error:
            reason = (
                f"a reward worker could not be started: {error}; lower reward.num_workers or free resources"
            )
            log.exception("reward supervisor stopped")
        finally:
            with self._lock:
                self._stopped = self._stopped or reason
                os.close(self._wake_write)
                self._wake_write = -1
            if not self.ready.done():
                self.ready.set_exception(RewardError(reason))
            self._end_workers()
            self._printed.close()
            left = [
                *(call for worker in self._workers for call in worker.sent),
                *self._waiting,
                *self._incoming,
            ]
            deliver([*self._done, *((call, unscored(reason)) for call in left)])
            self._selector.close()
            os.close(self._wake_read)

    def _wait_s(self) -> float | None:
        deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
        if not deadlines:
            return None
        return min(max(0.0, min(deadlines) - time.monotonic()), _CHECK_S)

    def _on_wake(self, _mask: int) -> None:
        os.read(self._wake_read, 4096)

    # workers

    def _spawn(self) -> None:
        worker = WorkerProcess(self._launch, self._printed)
        self._workers.append(worker)
        register = self._selector.register
        register(worker.results_fd, selectors.EVENT_READ, partial(self._on_results, worker))
        register(worker.output_fd, selectors.EVENT_READ, partial(self._on_output, worker))
        register(worker.printed_fd, selectors.EVENT_READ, partial(self._on_printed, worker))
        self._push(worker)

    def _push(self, worker: WorkerProcess) -> None:
        """Write to the worker; watch its pipe while it is full."""
        has_rest = worker.push()
        is_watched = worker.commands_fd in self._selector.get_map()
        if has_rest and not is_watched:
            self._selector.register(
                worker.commands_fd, selectors.EVENT_WRITE, lambda _mask: self._push(worker)
            )
        elif is_watched and not has_rest:
            self._selector.unregister(worker.commands_fd)

    def _on_output(self, worker: WorkerProcess, _mask: int) -> None:
        if worker.state != "dead" and not worker.read_output():
            self._selector.unregister(worker.output_fd)

    def _on_printed(self, worker: WorkerProcess, _mask: int) -> None:
        if worker.state != "dead" and not worker.read_printed():
            self._selector.unregister(worker.printed_fd)

    def _on_results(self, worker: WorkerProcess, _mask: int) -> None:
        if worker.state == "dead":
            return
        if self._read_messages(worker):
            self._bury(worker, wait_s=REAP_S)

    def _read_messages(self, worker: WorkerProcess) -> bool:
        """Handle what has arrived; True when the worker is finished, or not to be trusted any more."""
        lines, has_ended = worker.pull()
        try:
            for line in lines:
                self._on_message(worker, decode(line))
        except ValueError as error:
            log.warning("a reward worker wrote something unexpected and is replaced: %s", error)
            return True
        return has_ended

    def _on_message(self, worker: WorkerProcess, message: list[object]) -> None:
        if worker.note(message):
            return
        match message:
            case ["done", int(number), *_] if worker.sent and worker.sent[0].number == number:
                outcome = outcome_of(message)
                if worker.kill_at is not None:  # it came back because it was asked where it hangs
                    outcome = self._timeout(worker, worker.where())
                self._done.append((worker.finish(), outcome))
                self._idle_deaths, self._last_death = 0, ""
                self._mean_s += 0.1 * (outcome.seconds - self._mean_s)
            case ["ready", str(style)]:
                worker.state = "ready"
                if not self.ready.done() and all(each.state == "ready" for each in self._workers):
                    self.ready.set_result(style)
            case ["failed", str(sentence)]:
                self._last_death = sentence
                if not self.ready.done():
                    self.ready.set_exception(RewardError(sentence))
            case _:
                raise ValueError(f"no message of a reward worker: {str(message)[:200]}")

    def _bury(self, worker: WorkerProcess, *, wait_s: float, timed_out: bool = False) -> None:
        """Read the last words of a worker, see it gone, settle its current call, take back the others."""
        where = worker.where()
        status = worker.reap(wait_s=wait_s)
        where = where or worker.where()
        if not timed_out:
            self._read_messages(worker)
        if worker.current is not None:
            if timed_out:
                self._done.append((worker.sent.popleft(), self._timeout(worker, where)))
            elif status not in _OVERTAXED or not worker.sent[0].leave_out(worker.grading):
                outcome = Outcome(
                    kind="error",
                    seconds=time.monotonic() - worker.since,
                    error=f"the worker process {death_sentence(status)} in {self._label}{where}",
                )
                self._done.append((worker.sent.popleft(), outcome))
        elif not worker.calls_done or worker.sent:
            self._idle_deaths += 1
            self._was_killed = status == -signal.SIGKILL
            action = "loading" if worker.state == "loading" else "preparing to score with"
            death = f"the worker process {death_sentence(status)} while {action} {self._label}{where}"
            self._last_death = self._last_death or death
        while worker.sent:
            self._waiting.appendleft(worker.sent.pop())
        for fd in (worker.results_fd, worker.output_fd, worker.printed_fd, worker.commands_fd):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        worker.release()

    def _timeout(self, worker: WorkerProcess, where: str) -> Outcome:
        return Outcome(
            kind="timeout",
            seconds=time.monotonic() - worker.since,
            error=f"{self._label} did not finish in {self._launch.timeout_s:g} s (reward.timeout_s){where}",
        )

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.state == "dead":
                continue
            deadline = worker.deadline
            if deadline is not None and now >= deadline:
                self._on_deadline(worker, deadline, now)
            elif deadline is not None and not worker.is_running():
                self._bury(worker, wait_s=REAP_S)

    def _on_deadline(self, worker: WorkerProcess, deadline: float, now: float) -> None:
        if worker.current is not None:
            self._on_results(worker, selectors.EVENT_READ)  # the result may lie in the pipe already
            if worker.deadline != deadline:
                return
        if worker.kill_at is not None:
            self._bury(worker, wait_s=0.0, timed_out=True)
        elif worker.current is not None:
            worker.ask_where(now + _DUMP_S)
        else:
            limit = f"within {self._launch.start_timeout_s:g} s (reward.start_timeout_s)"
            worker.ask_where(now)
            time.sleep(_DUMP_S)  # nothing else can go on with a worker that does not load
            self._last_death = f"{self._label} could not be loaded {limit}: its imports hang{worker.where()}"
            if not self.ready.done():
                self.ready.set_exception(RewardError(self._last_death))
            self._bury(worker, wait_s=0.0)

    def _replace_dead(self) -> None:
        self._workers = [worker for worker in self._workers if worker.state != "dead"]
        if len(self._workers) == self._num_workers or self._is_given_up:
            return
        is_hopeless = self._idle_deaths >= _MAX_IDLE_DEATHS
        if not self.ready.done() and (is_hopeless or (self._idle_deaths and not self._was_killed)):
            self.ready.set_exception(RewardError(self._last_death))
        if self.ready.done() and self.ready.exception() is not None:
            self.stop(self._last_death)
        elif is_hopeless:
            self._give_up()
        else:
            self._fill_up()

    def _fill_up(self) -> None:
        for _ in range(self._num_workers - len(self._workers)):
            self._spawn()

    def _give_up(self) -> None:
        """Let the waiting calls go without a score. The next ones find workers of their own, which may live longer."""
        reason = f"reward workers die before they score anything: {self._last_death}"
        self._done += ((call, unscored(reason)) for call in self._waiting)
        self._waiting.clear()
        self._is_given_up, self._idle_deaths, self._last_death = True, 0, ""

    # calls

    def _dispatch(self) -> None:
        """Hand waiting calls, those that have just come among them, to the workers with the shortest queues."""
        with self._lock:
            incoming, self._incoming = self._incoming, []
        self._waiting.extend(incoming)
        if self._waiting and self._is_given_up:
            self._is_given_up = False
            self._fill_up()
        depth = min(_MAX_QUEUE, max(1, int(_QUEUE_S / max(self._mean_s, 1e-6))))
        ready = [worker for worker in self._workers if worker.state == "ready"]
        free = [worker for worker in ready if len(worker.sent) < depth]
        while self._waiting and free:
            worker = min(free, key=lambda each: len(each.sent))
            call = self._waiting.popleft()
            if call.future.cancelled():
                continue
            worker.send(call)
            if len(worker.sent) >= depth:
                free.remove(worker)
        for worker in ready:
            if worker.has_output_waiting:
                self._push(worker)

    def _end_workers(self) -> None:
        living = [worker for worker in self._workers if worker.state != "dead"]
        for worker in living:
            worker.end_input()
        until = time.monotonic() + REAP_S
        for worker in living:
            worker.reap(wait_s=0.0 if worker.sent else max(0.0, until - time.monotonic()))
            worker.release()
