"""Manager of worker processes that fail together, and the only place where the controller waits for them.

A call that is given to a process becomes a `PendingCall`. `WorkerManager.wait` returns when it is settled; while it
waits it looks at every open call of all processes a few times a second, and now and then asks processes without
one whether they live, so that a failure anywhere ends the wait, not only one of the process waited for. A
call has its deadline: the process must answer within that time after it got the call and after the last
answer of any process (calls queue, and may wait for each other's results).

The first failure stops all of them: all processes are killed, and whoever uses it afterwards is told why. A process
that can be replaced is the exception: its end costs its own calls (`RankLost`), while others of its pool live.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from strop.controller.errors import CallTimeout
from strop.controller.ray.errors import GroupStopped, RankFailed, RankLost
from strop.controller.ray.failures import (
    ObservedFailure,
    first_failure,
    has_died,
    is_secondary,
    not_started,
    observe_failure,
    stacks_of,
)
from strop.controller.ray.members import PendingCall, WorkerHandle
from strop.controller.ray.messages import CallResponse

log = logging.getLogger(__name__)

_LOOK_S = 0.2
"""Interval at which a wait checks all processes."""
_PING_S = 5.0
"""Interval at which a wait pings processes without a call."""
_PONG_S = 120.0
"""Timeout of the answer to a ping; a machine out of memory can be very slow."""
_GRACE_S = 10.0
"""Time to look for the cause after an error that looks like the consequence of another one."""
_CAUSE_GRACE_S = 0.3
"""Time to wait for earlier failures that are still on their way, once a cause is known."""
_KILL_S = 10.0
"""Time for killed processes to disappear."""


class WorkerManager:
    """Worker processes, their calls, and their end."""

    def __init__(self, *, on_stop: Callable[[], None]) -> None:
        """Begin without a process.

        Args:
            on_stop: gives back what the processes held, once they are gone.
        """
        self.members: list[WorkerHandle] = []
        """All processes, followers behind their leaders."""
        self.stopped_because = ""
        """Reason for which no call is possible any more; empty while calls are."""
        self.losses: list[RankLost] = []
        """Ends of processes that the others went on without."""
        self._on_stop = on_stop
        self._numbers = itertools.count()
        self._calls: dict[int, list[PendingCall]] = {}
        self._failure: Exception | None = None
        self._progress_at = 0.0
        self._pinged_at = 0.0
        self._lock = threading.RLock()

    @property
    def has_failed(self) -> bool:
        """True where a process failed or did not answer in time."""
        return self._failure is not None

    # ---------------------------------------------------------------- calls

    def next_call(self) -> int:
        """A number for a call that several processes get."""
        return next(self._numbers)

    def give(
        self,
        member: WorkerHandle,
        give: Callable[[Any], Any],
        *,
        role: str = "",
        method: str,
        call: int | None = None,
        timeout_s: float,
        objects: Sequence[Any] = (),
    ) -> PendingCall:
        """Give a process a call; `give(handle)` returns Ray's reference to the answer, and may fill `objects` with
        references to what is returned beside it.

        Raises:
            GroupStopped: the processes were stopped; says why.
        """
        with self._lock:
            self.check_works()
            pending = PendingCall(
                member=member,
                role=role,
                method=method,
                call=self.next_call() if call is None else call,
                reference=give(member.handle) if member.loss is None else None,
                timeout_s=timeout_s,
                given_at=time.monotonic(),
                objects=objects,
            )
            if member.loss is not None:
                pending.error, pending.is_settled = member.loss, True
                return pending
            member.queue.append(pending)
            self._calls.setdefault(pending.call, []).append(pending)
            return pending

    def ask(
        self,
        members: Sequence[WorkerHandle],
        give: Callable[[Any], Any],
        *,
        method: str,
        timeout_s: float,
    ) -> list[Any]:
        """Give these processes one call, as `give` does, and wait: their answers, in the order of the processes.

        Raises:
            WorkerFailed, CallTimeout, GroupStopped: as `give` and `wait`.
        """
        call = self.next_call()
        pending_calls = [
            self.give(member, give, method=method, call=call, timeout_s=timeout_s) for member in members
        ]
        return [self.wait(pending) for pending in pending_calls]

    def wait(self, pending: PendingCall) -> Any:
        """The answer to a call.

        Raises:
            WorkerFailed: a process failed, this one or another; says which one first.
            WorkerLost: this process is gone, and the others go on.
            CallTimeout: processes did not answer in time.
            GroupStopped: they were stopped before the answer came.
        """
        while True:
            with self._lock:
                if not pending.is_settled or pending.error is not None:
                    self._collect()
                if pending.is_settled and pending.error is None:
                    return pending.answer
                if isinstance(pending.error, RankLost):
                    raise pending.error
                if self._failure is not None:
                    raise self._failure
                self.check_works()
                self._check_deadlines()
                self._ping()
                calls_of_group = self._calls.get(pending.call, [])
                together = [call.reference for call in calls_of_group if not call.is_settled] or [
                    pending.reference
                ]
            # All of a group call: whoever waits for one answer wants those of the others next.
            ray.wait(together, num_returns=len(together), timeout=_LOOK_S, fetch_local=False)

    def look(self) -> None:
        """Raise the failure of a process, if there is one; waits for nothing."""
        with self._lock:
            self._collect()
            if self._failure is not None:
                raise self._failure

    def check_lives(self, member: WorkerHandle) -> None:
        """Ask a process and its followers for a sign of life where they have no call, and wait for it.

        Raises:
            WorkerFailed, CallTimeout, GroupStopped: as `give` and `wait`.
        """
        self.look()
        # A process with a call fails by that, and would answer behind it alone.
        idle = [process for process in (member, *member.followers) if not process.queue]
        self.ask(idle, lambda handle: handle.process_info.remote(), method="", timeout_s=_PONG_S)

    def check_works(self) -> None:
        """Raise GroupStopped where the processes were stopped."""
        if self.stopped_because:
            raise GroupStopped(self.stopped_because) from self._failure

    def _collect(self) -> None:
        """Settle the answered calls; the first error stops all processes, but for the end of a replaceable one."""
        self._settle_ready()
        if self._failure is None and not self.stopped_because:
            self._drop_lost()
        failed = [pending for pending in self._queue_heads() if pending.error is not None]
        if failed and self._failure is None and not self.stopped_because:
            self._fail()

    def _settle_ready(self) -> None:
        waiting = [t for member in self.members for t in member.queue if not t.is_settled]
        if not waiting:
            return
        references = [pending.reference for pending in waiting]
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
        ready_references = set(ready)
        for pending in waiting:
            if pending.reference in ready_references:
                self._settle(pending)

    def _settle(self, pending: PendingCall) -> None:
        member = pending.member
        try:
            pending.answer = ray.get(pending.reference)
        except Exception as error:  # noqa: BLE001  whatever it is, it is the report of a failure
            pending.error = error
            # Each has the error, and Ray prints those that nobody has looked at.
            for reference in pending.objects:
                with contextlib.suppress(Exception):
                    ray.get(reference, timeout=_CAUSE_GRACE_S)
        pending.is_settled = True
        member.answered_at = time.monotonic()
        if pending.method:  # a sign of life of an idle process says nothing about the others
            self._progress_at = time.monotonic()
        if isinstance(pending.answer, CallResponse):
            member.peak_memory_bytes = max(member.peak_memory_bytes, pending.answer.peak_memory_bytes)
        self._close_settled(pending.call)
        while member.queue and member.queue[0].is_settled and member.queue[0].error is None:
            settled = member.queue.popleft()
            member.last_call = settled if settled.method else member.last_call

    def _close_settled(self, call: int) -> None:
        if all(pending.is_settled for pending in self._calls[call]):
            del self._calls[call]

    def _queue_heads(self) -> list[PendingCall]:
        """The call that each process runs or failed at."""
        return [member.queue[0] for member in self.members if member.queue]

    def _ping(self) -> None:
        now = time.monotonic()
        if now - self._pinged_at < _PING_S:
            return
        self._pinged_at = now
        self._ping_idle()

    def _ping_idle(self) -> None:
        for member in self.members:
            if not member.queue and not (member.leader and member.leader.is_starting):
                self.give(member, lambda handle: handle.process_info.remote(), method="", timeout_s=_PONG_S)

    # ---------------------------------------------------------------- failures

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        late = [
            pending
            for pending in self._queue_heads()
            if not pending.is_settled and now - self._last_sign(pending) > pending.timeout_s
        ]
        for pending in [pending for pending in late if pending.member.is_starting]:
            late.remove(pending)
            self.drop(pending.member, not_started(pending))
        if not late:
            return
        first = min(late, key=lambda pending: pending.call)
        missing = {pending.member.rank: pending.member for pending in late if pending.call == first.call}
        answered = sorted(call.member.rank for call in self._calls[first.call] if call.is_settled)
        method = first.label or "a sign of life"
        text = (
            f"{method}: {', '.join(f'rank {rank} ({member.where})' for rank, member in sorted(missing.items()))} "
            f"{'has' if len(missing) == 1 else 'have'} not answered within {first.timeout_s:g} s"
        )
        if answered:
            text += f"; rank{'s' * (len(answered) > 1)} {', '.join(map(str, answered))} answered"
        tails = [f"end of {m.log_path}:\n{tail}" for m in missing.values() if (tail := stacks_of(m))]
        note = "all workers of the runtime were stopped"
        error = CallTimeout("\n".join([f"{text}; {note}", *tails]), method=method, missing=sorted(missing))
        self._failure = error
        self.stop(f"the workers were stopped after a timeout ({text}); make a new runtime")
        raise error

    def _last_sign(self, pending: PendingCall) -> float:
        """Time from which a call's deadline counts: of the last answer of any process, or of its own where it starts
        while others go on."""
        member = pending.member
        return max(pending.given_at, member.answered_at if member.is_starting else self._progress_at)

    def _drop_lost(self) -> None:
        """Drop replaceable ranks of which a process is gone, and replacements that did not come up, while others
        live."""
        for member in list(self.members):
            head, leader = member.queue[0] if member.queue else None, member.leader or member
            if head is None or head.error is None or not leader.is_replaceable or leader.loss is not None:
                continue
            if (has_died(head.error) or leader.is_starting) and self._has_others(leader):
                failure = observe_failure(head).failure
                self.drop(leader, RankLost(failure, was_starting=leader.is_starting))

    def _has_others(self, member: WorkerHandle) -> bool:
        pool = [other for other in self.members if other.pool == member.pool and not other.is_starting]
        return any(other is not member and other.leader is None for other in pool)

    def drop(self, member: WorkerHandle, loss: RankLost) -> None:
        """End the processes of a rank without which the others go on; its calls get this error."""
        self.losses.append(loss)
        for process in (member, *member.followers):
            process.loss = loss
            self.members.remove(process)
            for pending in process.queue:
                pending.error, pending.is_settled = loss, True
            for call in {pending.call for pending in process.queue} & self._calls.keys():
                self._close_settled(call)
            process.queue.clear()
            ray.kill(process.handle, no_restart=True)

    def _fail(self) -> None:
        started_at = time.monotonic()
        observations: dict[int, ObservedFailure] = {}
        self._ping_idle()  # the cause may be the end of a process without a call, such as one that kept rows
        while True:
            self._settle_ready()
            for pending in self._queue_heads():
                if pending.error is not None and id(pending) not in observations:
                    observations[id(pending)] = observe_failure(pending)
            has_cause = any(not is_secondary(observation) for observation in observations.values())
            waiting = any(not pending.is_settled for pending in self._queue_heads())
            if not waiting or time.monotonic() - started_at > (_CAUSE_GRACE_S if has_cause else _GRACE_S):
                break
            time.sleep(0.02)
        failure = first_failure(list(observations.values()))
        error = RankFailed(failure, num_later=len(observations) - 1)
        self._failure = error
        self.stop(f"the workers were stopped after a failure ({failure.sentence()}); make a new runtime")
        raise error

    # ---------------------------------------------------------------- the end

    def stop(self, because: str) -> None:
        """Kill all processes and wait until they are gone; more than once does no harm."""
        with self._lock:
            if self.stopped_because:
                return
            self.stopped_because = because
            if ray.is_initialized():
                for member in self.members:
                    ray.kill(member.handle, no_restart=True)
            _wait_until_gone(self.members)
            self._on_stop()

    def leave(self) -> None:
        """Let the processes go on without this controller; more than once does no harm."""
        with self._lock:
            self.stopped_because = self.stopped_because or (
                "this controller has left the group; attach to it again"
            )

    def close(self, timeout_s: float) -> None:
        """Let all workers close what they hold, then stop; an error of one is raised after the stop. Followers hold
        nothing but for their leaders.

        Where a process still runs a call, or failed at one, they are stopped without closing.
        """
        with self._lock:
            if self.stopped_because:
                return
            try:
                for member in [member for member in self.members if member.is_starting and member.queue]:
                    self.drop(member, not_started(member.queue[0]))
                self._settle_ready()
                if not any(pending.method for member in self.members for pending in member.queue):
                    self.ask(
                        [member for member in self.members if member.leader is None],
                        lambda handle: handle.close.remote(),
                        method="close",
                        timeout_s=timeout_s,
                    )
            finally:
                self.stop("this runtime is closed; make a new one")


def _wait_until_gone(members: Sequence[WorkerHandle]) -> None:
    """Ray ends processes by a message to them; one on this machine that does not listen is killed."""
    process_infos = [
        member.process_info for member in members if member.node.is_here and member.process_info is not None
    ]
    local_pids = [
        pid for process_info in process_infos for pid in (process_info.pid, process_info.parent_pid)
    ]
    end = time.monotonic() + _KILL_S
    is_insisting = False
    while alive := [pid for pid in local_pids if _is_alive(pid)]:
        if time.monotonic() > end:
            if is_insisting:
                log.warning("worker processes %s do not end", alive)
                return
            is_insisting, end = True, time.monotonic() + _KILL_S
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:  # no /proc, or the process ended in between
        return not Path("/proc").is_dir()
    return state != "Z"  # a zombie has ended and waits for its parent
