"""Messages between the controller and a worker process; plain values, and references to rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strop.controller.ray.transport import BatchRefs


@dataclass(frozen=True, kw_only=True)
class CallResponse:
    """Response to a call: value and peak memory; small, whatever the call computed."""

    value: Any
    """The method's value, where it is no batch."""
    stored: BatchRefs | None
    """References to the rows, where the value is a batch; numbers of objects, where these are returned beside it."""
    metrics: tuple[Any, ...] | None = None
    """Metrics beside the rows, where the value is a batch with metrics."""
    peak_memory_bytes: int
    """Most memory the process has held so far."""


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """Facts of a worker process that has started."""

    pid: int
    """Its process id."""
    parent_pid: int
    """Process id of the launcher, which ends right after it."""
    free_port: int
    """A port that was free there a moment ago."""


@dataclass(frozen=True, kw_only=True)
class RaisedReport:
    """An error that a worker raised, in words."""

    exception_type: str
    """Qualified name of its class."""
    message: str
    """Its text."""
    traceback: str
    """The worker's traceback."""
    at: float
    """Time, in seconds since the epoch by the clock of the worker's node."""
    peak_memory_bytes: int
    """Most memory the process had held by then."""
    is_consequence: bool
    """True where the worker could not get an argument because of the failure of another one."""
    facts: Mapping[str, int]
    """Its numbers, as of `strop.controller.WorkerFailed`."""
    ends_worker: bool = False
    """The worker can do nothing any more (FollowerLost)."""


class MethodRaised(Exception):
    """Carries the report of an error from a worker process; always travels, whatever the error held."""

    def __init__(self, report: RaisedReport) -> None:
        super().__init__(report)
        self.report = report
        """The error in words."""
