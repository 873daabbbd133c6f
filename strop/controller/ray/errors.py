"""Errors of worker processes, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from strop.controller.errors import WorkerFailed, WorkerLost

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Failure:
    """First failure of a runtime, with everything that is known of it."""

    role: str
    """Role of the worker, or all roles of its process where it died between two calls."""
    rank: int
    """Number of its process in the pool."""
    node: str
    """Address of its node."""
    pid: int
    """Process id there; 0 where it never started."""
    method: str
    """The method that it ran, or the last one that it was given; empty where it had none yet."""
    exception_type: str = ""
    """Qualified name of what the worker raised; empty where the process died."""
    facts: Mapping[str, int] = field(default_factory=dict)
    """Numbers of the exception, as of `WorkerFailed`."""
    message: str = ""
    """Text of the exception, or the runtime's message about the death."""
    traceback: str = ""
    """The worker's own traceback."""
    exit_signal: str = ""
    """Name of the signal that ended the process, such as SIGKILL; empty where none did or none is known."""
    exit_code: int | None = None
    """Exit code of a process that ended by itself; None where it did not, or none is known."""
    peak_memory_bytes: int = 0
    """Most memory the process held, as it last said or as its parent saw at its end; 0: unknown."""
    log_path: Path | None = None
    """File with the output of the process, on its node."""
    log_tail: str = ""
    """Last lines of that file, where they can be read."""
    at: float = 0.0
    """Time of the failure, in seconds since the epoch by the clock of its node."""
    ends_worker: bool = False
    """Raised by a worker that can do nothing any more (FollowerLost)."""

    def sentence(self) -> str:
        """One line: the worker, its process, the failure and the method."""
        worker = f"{self.role} rank {self.rank}" if self.role else f"rank {self.rank}"
        process = f"node {self.node or '?'}, pid {self.pid or '?'}"
        if self.exception_type:
            first_line = self.message.strip().partition("\n")[0]
            event = f"raised {self.exception_type}" + (f": {first_line}" if first_line else "")
        elif self.exit_signal:
            event = f"was killed by {self.exit_signal}"
        elif self.exit_code is not None:
            event = f"ended with exit code {self.exit_code}"
        else:
            event = "died"
        when = f" during {self.method}" if self.method else ""
        memory = f"; peak memory {self.peak_memory_bytes / _GIB:.2f} GiB" if self.peak_memory_bytes else ""
        return f"{worker} ({process}) {event}{when}{memory}"

    def report(self) -> str:
        """The sentence, then the worker's traceback and the tail of its log."""
        parts = [self.sentence()]
        if self.exit_signal == "SIGKILL":
            parts.append(
                "(SIGKILL comes from kill -9 or from the kernel when memory runs out; see dmesg there)"
            )
        if self.traceback:
            parts.append(f"traceback of the worker:\n{self.traceback.rstrip()}")
        elif self.message and not self.exception_type:
            parts.append(self.message.strip())
        if self.log_tail:
            parts.append(f"end of {self.log_path}:\n{self.log_tail.rstrip()}")
        elif self.log_path is not None:
            parts.append(f"its output is in {self.log_path} on that node")
        return "\n".join(parts)


class RankFailed(WorkerFailed):
    """A worker of a pool failed; reports the first failure, not the last."""

    def __init__(self, failure: Failure, *, num_later: int = 0) -> None:
        self.failure = failure
        """The first failure."""
        self.has_died = not failure.exception_type or failure.ends_worker
        self.exception_type, self.role, self.facts = failure.exception_type, failure.role, failure.facts
        self.num_later = num_later
        """Failures of other workers that followed and are taken for its consequences."""
        later = (
            f"\n{num_later} later error{'s' * (num_later > 1)} of other workers suppressed"
            if num_later
            else ""
        )
        super().__init__(f"first failure: {failure.report()}{later}")


class RankLost(WorkerLost):
    """A process that can be replaced ended, or did not come up; its calls get this error."""

    def __init__(self, failure: Failure, *, was_starting: bool = False) -> None:
        self.failure = failure
        """Its end."""
        self.was_starting = was_starting
        """It was a replacement that had not joined the others."""
        super().__init__(failure.report())


class GroupStopped(RuntimeError):
    """A call on workers that were stopped before; the sentence says why they were."""


class NotEnoughDevices(ValueError):
    """More devices or processor cores were asked for than there are."""
