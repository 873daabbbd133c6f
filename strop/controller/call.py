"""One call of one worker's method, and how it is carried out in the worker's process, whatever the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from strop.controller.worker import Worker
from strop.protocol import DataProto, DataProtoFuture


class Returns(Enum):
    """What the group wants of the value that a worker's method returns."""

    VALUE = "value"
    """The value, whatever it is."""
    ROWS = "rows"
    """A batch: `submit` returns PendingRows, whose `num_rows` moves no row."""
    NOTHING = "nothing"
    """Only that the method ended: its value is dropped in the worker, and `result()` gives None."""

    def of(self, value: Any, worker: Worker) -> Any:
        """What leaves the worker; to be called in the worker's process.

        Raises:
            TypeError: a batch was wanted, and the method returned something else.
        """
        if self is Returns.NOTHING:
            return None
        if self is Returns.ROWS and not isinstance(value, DataProto):
            raise TypeError(
                f"worker {worker.rank} returned {type(value).__name__}, but this dispatch mode joins "
                f"DataProtos; return one, or register the method with Dispatch.DP_COMPUTE_METRIC to get a list"
            )
        return value


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
    """Turn DataProtoFutures among the arguments into batches, in the worker."""
    returns: Returns = Returns.VALUE
    """What is wanted of the method's value."""

    def run(self, worker: Worker, here: Callable[[Any], Any]) -> Any:
        """Run it in the worker's process; what leaves the worker.

        Args:
            worker: whose method it is.
            here: an argument as this process holds it -> what the method gets, but for futures of batches.

        Raises:
            RuntimeError: the method wrote into an argument, which other workers may read from the same memory.
        """

        def arrived(arg: Any) -> Any:
            own = here(arg)
            return here(own.get()) if self.materialize and isinstance(own, DataProtoFuture) else own

        args = [arrived(arg) for arg in self.args]
        kwargs = {name: arrived(arg) for name, arg in self.kwargs.items()}
        watched = [(tensor, what, tensor._version) for tensor, what in _tensors([*args, *kwargs.values()])]
        value = getattr(worker, self.method)(*args, **kwargs)
        for tensor, what, count in watched:
            if tensor._version != count:
                raise RuntimeError(
                    f"{type(worker).__name__}.{self.method} wrote into {what} it was given; clone it before "
                    f"writing, or return a new one"
                )
        return self.returns.of(value, worker)


def _tensors(args: Sequence[Any]) -> Iterator[tuple[Tensor, str]]:
    """The tensors among the arguments and in their columns of which torch counts the writes, and what they are."""
    for arg in args:
        if isinstance(arg, Tensor):
            found = {"a tensor": arg}
        elif isinstance(arg, DataProto):
            found = {f"column {name!r} of the batch": column for name, column in arg.tensors().items()}
        else:
            continue
        yield from ((tensor, what) for what, tensor in found.items() if not tensor.is_inference())
