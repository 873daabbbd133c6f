"""Errors of workers in other processes, for every runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType


class WorkerFailed(RuntimeError):
    """A worker raised an error or its process died.

    The runtime has stopped all its other workers and cannot be used any more.
    """

    has_died = False
    """Its process is gone; else it raised an error of its own."""
    exception_type = ""
    """Qualified name of the error that it raised; empty where it has died."""
    role = ""
    """Role that the worker was in, where that is known."""
    facts: Mapping[str, int] = MappingProxyType({})
    """Numbers that the error it raised has in an attribute `facts`, a dict."""


class WorkerLost(WorkerFailed):
    """The process of a worker that can be replaced is gone, and its calls with it; the others of its group go on.

    Its runtime can be used further: a call that raised this is made again, by those that are left.
    """

    has_died = True


class FollowerLost(ConnectionError):
    """Raised in a worker whose devices on another node are gone with their process, so that it can do nothing any more.

    A runtime takes it for the end of the worker's own process.
    """


class CallTimeout(TimeoutError):
    """Workers did not answer in time; names those that did not.

    The runtime has stopped all its workers and cannot be used any more.
    """

    def __init__(self, message: str, *, method: str, missing: Sequence[int]) -> None:
        self.method = method
        """The call: `role.method`, or a phase of the start."""
        self.missing = tuple(missing)
        """Ranks that did not answer."""
        super().__init__(message)


class PlacesNotFree(TimeoutError):
    """Processes were not placed in time: others hold what the cluster has, or a machine that it lists is gone."""
