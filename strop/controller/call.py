"""One call of one worker's method, and its execution in the worker's process, for every runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from strop.controller.worker import Worker
from strop.protocol import DataProto
from strop.utils import timeline

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A value that is being computed; `concurrent.futures.Future` is one."""

    def result(self) -> T_co:
        """Wait for the value; an error of the computation is raised here."""


class Returns(Enum):
    """Kind of value that the group takes from a worker's method."""

    VALUE = "value"
    """The value, whatever it is."""
    ROWS = "rows"
    """A batch, which `WorkerGroup.joined` takes."""
    ROWS_AND_METRICS = "rows and metrics"
    """A `BatchAndMetrics`."""
    NOTHING = "nothing"
    """Only that the method ended: its value is dropped in the worker, and `result()` gives None."""


@dataclass(frozen=True, kw_only=True)
class BatchAndMetrics(Generic[T]):
    """The result of a method with Dispatch.DP_COMPUTE_PROTO_AND_METRIC, on a worker and for its group.

    The metrics come to the controller; the rows stay with the workers that made them.
    """

    batch: DataProto
    """Columns of the rows that were given."""
    metrics: tuple[T, ...]
    """A worker gives one; the group has one per data-parallel group, in order."""


@dataclass(frozen=True, kw_only=True)
class WorkerCall:
    """Method call for one worker of a group."""

    rank: int
    """The worker."""
    method: str
    """Its method, marked or not."""
    args: Sequence[Any]
    """Positional arguments. Workers of one data-parallel group are given the same objects, so a runtime may send each
    object once."""
    kwargs: Mapping[str, Any]
    """Keyword arguments."""
    materialize: bool = True
    """Fetch the rows of batches that workers hold, in the worker."""
    returns: Returns = Returns.VALUE
    """Kind of value that the call returns."""

    def run(self, worker: Worker) -> Any:
        """Run the method in the worker's process and return the value that leaves the worker.

        The method gets batches of its own, around the same tensors.

        Raises:
            RuntimeError: the method wrote into a tensor, which others may read from the same memory.
            TypeError: a batch, or one with metrics, was wanted, and the method returned something else.
        """

        def own(arg: object) -> Any:
            if not isinstance(arg, DataProto):
                return arg
            return arg.get() if self.materialize else arg.select()

        with timeline.on_track(worker.timeline_track):
            return self._run(worker, own)

    def _run(self, worker: Worker, own: Callable[[object], Any]) -> Any:
        """As `run`, on the worker's track of the timeline; `own` gives the worker's own form of an argument."""
        with timeline.span("waits for its arguments", "wait"):
            args = [own(arg) for arg in self.args]
            kwargs = {name: own(arg) for name, arg in self.kwargs.items()}
        tensors: list[tuple[Tensor, str]] = []
        for arg in [*args, *kwargs.values()]:
            if isinstance(arg, Tensor):
                tensors.append((arg, "a tensor"))
            elif isinstance(arg, DataProto) and self.materialize:
                tensors += [
                    (column, f"column {name!r} of the batch") for name, column in arg.tensors().items()
                ]
        # torch counts the writes into each, but for those of inference mode
        watched = [(tensor, label, tensor._version) for tensor, label in tensors if not tensor.is_inference()]
        with timeline.span(self.method, "call"):
            value = getattr(worker, self.method)(*args, **kwargs)
        for tensor, label, version in watched:
            if tensor._version != version:
                raise RuntimeError(
                    f"{type(worker).__name__}.{self.method} wrote into {label} it was given; clone it before "
                    f"writing, or return a new one"
                )
        if self.returns is Returns.ROWS and not isinstance(value, DataProto):
            raise TypeError(
                f"worker {worker.rank} returned {type(value).__name__}, but this dispatch mode joins "
                f"DataProtos; return one, or register the method with Dispatch.DP_COMPUTE_METRIC to get a list"
            )
        if self.returns is Returns.ROWS_AND_METRICS and not isinstance(value, BatchAndMetrics):
            raise TypeError(
                f"worker {worker.rank} returned {type(value).__name__}, but this dispatch mode joins batches with "
                f"metrics; return a BatchAndMetrics"
            )
        return None if self.returns is Returns.NOTHING else value
