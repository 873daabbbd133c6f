"""Diagnosis of the first failure of a runtime.

When one worker fails, its peers fail too: their collectives lose a connection, their arguments cannot be
computed. The report names the cause. A process that died and an error of a worker's own come before what
looks like a lost connection; among them the earlier one counts, by the clocks of the workers.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from strop.controller.ray.cluster import run_on
from strop.controller.ray.errors import Failure, RankLost
from strop.controller.ray.launcher import ProcessEnd, process_end
from strop.controller.ray.members import PendingCall, WorkerHandle
from strop.controller.ray.messages import MethodRaised
from strop.controller.ray.process import DUMP_SIGNAL

_TAIL_LINES = 30
_TAIL_BYTES = 16 * 1024
_END_S = 2.0
"""Time that the launcher of a process that died has to record its end."""
_REMOTE_S = 20.0
"""Timeout of reading a log on another machine; it starts a process there."""
_DUMP_S = 0.5
"""Timeout of a process that writes the stacks of its threads."""
_PEER_CLASSES = ("DistBackendError", "DistNetworkError", "DistStoreError", "ConnectionError", "ConnectionResetError",
                 "BrokenPipeError", "ConnectionAbortedError", "ConnectionRefusedError")  # fmt: skip
_PEER_WORDS = ("connection closed by peer", "connection reset by peer", "broken pipe", "socket closed",
               "connectfullmesh", "gloo", "remote process exited", "heartbeat")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ObservedFailure:
    """Failure of one process, classified as cause or consequence."""

    failure: Failure
    is_consequence: bool
    """True where the worker lacked an argument because another one failed."""


def is_secondary(observation: ObservedFailure) -> bool:
    """True where a failure looks like the consequence of another worker's."""
    failure = observation.failure
    if observation.is_consequence:
        return True
    if not failure.exception_type:
        return False
    text = failure.message.lower()
    is_peer_class = failure.exception_type.rpartition(".")[2] in _PEER_CLASSES
    return is_peer_class or (failure.exception_type == "RuntimeError" and any(w in text for w in _PEER_WORDS))


def first_failure(observations: Sequence[ObservedFailure]) -> Failure:
    """The one to report: a cause before consequences, then the earlier one."""
    return min(
        observations,
        key=lambda entry: (entry.is_consequence, is_secondary(entry), entry.failure.at),
    ).failure


def has_died(error: BaseException | None) -> bool:
    """True where Ray reports that a process is gone, and not what its method raised; or where that says that the worker
    can do nothing any more."""
    if isinstance(error, RayTaskError):
        cause = getattr(error, "cause", None)
        return isinstance(cause, MethodRaised) and cause.report.ends_worker
    return error is not None


def observe_failure(pending: PendingCall) -> ObservedFailure:
    """Failure of a call, from its error and its process."""
    member, error = pending.member, pending.error
    method = pending.method or (member.last_call.method if member.last_call else "")
    basis = Failure(
        role=pending.role or "+".join(member.roles) or member.pool,
        rank=member.rank,
        node=member.node.address,
        pid=member.pid,
        method=method,
        peak_memory_bytes=member.peak_memory_bytes,
        log_path=member.log_path,
        at=time.time(),
    )
    cause = getattr(error, "cause", None)
    if isinstance(error, RayTaskError) and isinstance(cause, MethodRaised):
        facts = dataclasses.asdict(cause.report)
        is_consequence = facts.pop("is_consequence")
        raised = replace(basis, **facts, log_tail=_without_end_line(_log_of(member)))
        return ObservedFailure(failure=raised, is_consequence=is_consequence)
    if isinstance(error, RayTaskError):  # Ray itself could not run the call, or not store its result
        kind = type(cause).__name__ if cause is not None else "RayTaskError"
        failed = replace(basis, exception_type=kind, message=str(cause or error), traceback=str(error))
        return ObservedFailure(failure=failed, is_consequence=False)
    return ObservedFailure(failure=_process_failure(basis, member, error), is_consequence=False)


def not_started(pending: PendingCall) -> RankLost:
    """Loss of a replacement that has not come up in time."""
    member = pending.member
    return RankLost(
        Failure(
            role="+".join(member.roles) or member.pool,
            rank=member.rank,
            node=member.node.address,
            pid=member.pid,
            method=pending.method,
            exception_type="TimeoutError",
            message=f"it has not started within {pending.timeout_s:g} s",
            log_path=member.log_path,
        ),
        was_starting=True,
    )


def stacks_of(member: WorkerHandle) -> str:
    """Have a process that does not answer log the stacks of its threads; the end of its log."""
    if not member.pid:
        return _without_end_line(_log_of(member))
    if member.node.is_here:
        try:
            os.kill(member.pid, DUMP_SIGNAL)
        except OSError:
            return ""
        time.sleep(_DUMP_S)
        return _without_end_line(_log_of(member))
    return _without_end_line(_remote_log(member, DUMP_SIGNAL))


def _process_failure(basis: Failure, member: WorkerHandle, error: BaseException | None) -> Failure:
    """Failure completed by the launcher's record of the process's end and by the end of its log."""
    deadline = time.monotonic() + _END_S
    while True:
        text = _log_of(member)
        end: ProcessEnd | None = process_end(member.pid, text) if member.pid else None
        if end is not None or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    failure = replace(basis, message=_ray_error_text(error), log_tail=_without_end_line(text))
    if end is None:
        return failure
    return replace(
        failure,
        exit_signal=end.exit_signal,
        exit_code=end.exit_code,
        at=end.at,
        peak_memory_bytes=max(failure.peak_memory_bytes, end.peak_memory_bytes),
        message="" if end.exit_signal else failure.message,
    )


def _ray_error_text(error: BaseException | None) -> str:
    text = "" if error is None else str(error)
    return text if isinstance(error, RayError) else f"{type(error).__name__}: {text}"


def _without_end_line(text: str) -> str:
    """The last lines, without the one that the parent of the process adds."""
    lines = [line for line in text.splitlines() if not line.startswith("[strop] process ")]
    return "\n".join(lines[-_TAIL_LINES:])


def _log_of(member: WorkerHandle) -> str:
    if member.node.is_here or member.log_path.is_file():
        return tail(str(member.log_path))
    return _remote_log(member, None)


def tail(path: str) -> str:
    """The end of a file; empty where there is none."""
    file = Path(path)
    if not file.is_file():
        return ""
    with file.open("rb") as stream:
        stream.seek(max(file.stat().st_size - _TAIL_BYTES, 0))
        return stream.read().decode(errors="replace")


def signal_and_tail(pid: int, path: str, number: int | None) -> str:
    """On the node of a process: send it a signal, if one is given, and read the end of its log."""
    if number is not None:
        try:
            os.kill(pid, signal.Signals(number))
        except OSError:
            return ""
        time.sleep(_DUMP_S)
    return tail(path)


def _remote_log(member: WorkerHandle, number: int | None) -> str:
    reference = run_on(member.node.node_id, signal_and_tail, member.pid, str(member.log_path), number)
    try:
        return str(ray.get(reference, timeout=_REMOTE_S))
    except (RayError, GetTimeoutError) as error:
        return f"(the log on node {member.node.address} could not be read: {type(error).__name__})"
