"""One call of one worker's method, and how it is carried out in the worker's process, whatever the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from strop.controller.worker import Worker
from strop.protocol import DataProto

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A value that is being computed; `concurrent.futures.Future` is one."""

    def result(self) -> T_co:
        """Wait for the value; an error of the computation is raised here."""


class Returns(Enum):
    """What the group wants of the value that a worker's method returns."""

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
    """What one worker of a group is to do."""

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
    """What is wanted of the method's value."""

    def run(self, worker: Worker) -> Any:
        """Run it in the worker's process; what leaves the worker.

        The method gets batches of its own, around the same tensors.

        Raises:
            RuntimeError: the method wrote into a tensor, which others may read from the same memory.
            TypeError: a batch, or one with metrics, was wanted, and the method returned something else.
        """

        def own(arg: Any) -> Any:
            if not isinstance(arg, DataProto):
                return arg
            return arg.get() if self.materialize else arg.select()

        args, kwargs = [own(arg) for arg in self.args], {name: own(arg) for name, arg in self.kwargs.items()}
        given: list[tuple[Tensor, str]] = []
        for arg in [*args, *kwargs.values()]:
            if isinstance(arg, Tensor):
                given.append((arg, "a tensor"))
            elif isinstance(arg, DataProto) and self.materialize:
                given += [(one, f"column {name!r} of the batch") for name, one in arg.tensors().items()]
        # torch counts the writes into each, but for those of inference mode
        watched = [(one, what, one._version) for one, what in given if not one.is_inference()]
        value = getattr(worker, self.method)(*args, **kwargs)
        for tensor, what, count in watched:
            if tensor._version != count:
                raise RuntimeError(
                    f"{type(worker).__name__}.{self.method} wrote into {what} it was given; clone it before "
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
