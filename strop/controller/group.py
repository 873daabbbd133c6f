"""Worker group: all workers of a role, called like one worker.

The controller calls `group.call.method(...)`; the registration of the method says how the arguments reach
the workers and how the results become one. A runtime implements `submit`, the one way into a worker, and
answers for the deadline of what it returned and for failures of workers whose output nobody waits for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from strop.controller.call import BatchAndMetrics, Pending, Returns, WorkerCall
from strop.controller.dispatch import DispatchMode, partition_among
from strop.controller.errors import WorkerLost
from strop.controller.mesh import Mesh
from strop.controller.partition import Partition
from strop.controller.registration import Execute, Registration, registrations
from strop.controller.worker import Worker
from strop.protocol import DataProto

W = TypeVar("W", bound=Worker, covariant=True)
R = TypeVar("R")
M = TypeVar("M")


@dataclass(frozen=True)
class ResultFuture:
    """The result of a non-blocking call that is no joined batch."""

    parts: Sequence[Pending[Any]]
    """Pending output of each output rank (Mesh.output_ranks)."""
    collect: Callable[[list[Any]], Any]
    """Makes one result of the outputs."""
    others: Sequence[Pending[Any]] = ()
    """Other workers: waited for, because they may fail; their values stay where they are."""
    leaves_out_lost: bool = False
    """A worker that is lost meanwhile gives no output."""

    def get(self) -> Any:
        """Wait for all workers and return the result of the blocking call."""
        outputs: list[Any] = []
        for part in self.parts:
            try:
                outputs.append(part.result())
            except WorkerLost:
                if not self.leaves_out_lost:
                    raise
        for pending in self.others:
            pending.result()
        return self.collect(outputs)


class WorkerGroup(ABC, Generic[W]):
    """All workers of one role, under the worker's own type."""

    call_timeout_s: float | None
    """Seconds after which a call on this group fails, counted by the runtime from its submission; None: the
    runtime's own deadline. It may be set at any time and holds for the calls that follow."""

    def __init__(self, worker_class: type[W], mesh: Mesh) -> None:
        self._worker_class = worker_class
        self._mesh = mesh
        self._registrations = registrations(worker_class)
        self.call_timeout_s = None

    @abstractmethod
    def submit(self, calls: Sequence[WorkerCall]) -> list[Pending[Any]]:
        """Start the calls of one group call. Calls on one worker run in the order of their submission.

        Returns:
            The pending values in the same order. They may be dropped without a wait: that the method failed must then
            come up with what else is waited for.
        """

    def joined(self, outputs: Sequence[Pending[Any]], partition: Partition | None) -> DataProto:
        """The rows of the workers' batches, in the order of the caller's rows. A runtime may leave them with the
        workers, in a batch of its own that fetches them in `get`; here they come at once.

        Args:
            outputs: of the output ranks: batches, or batches with metrics.
            partition: what the caller has cut.
        """
        results: list[DataProto | BatchAndMetrics[Any]] = [output.result() for output in outputs]
        batches = [result.batch if isinstance(result, BatchAndMetrics) else result for result in results]
        rows = DataProto.concat(batches)
        order = None if partition is None else partition.order_of_results([len(batch) for batch in batches])
        return rows if order is None else rows.take(order)

    def metrics(self, output: Pending[BatchAndMetrics[M]]) -> tuple[M, ...]:
        """Wait for the metrics of a worker. A runtime may leave the rows beside them with the worker."""
        return output.result().metrics

    @property
    def mesh(self) -> Mesh:
        """The parallel axes of the group."""
        return self._mesh

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.mesh.world_size

    @property
    def ranks(self) -> list[int]:
        """Rank of each worker, by which it knows itself; some are missing while workers are lost (ElasticGroup)."""
        return list(range(self.world_size))

    @property
    def call(self) -> W:
        """The group under the worker's type: its registered methods run on the workers.

        The annotations are those of the method. Where the dispatch mode returns a list, `as_list` tells the type
        checker so; a Partition in place of a batch is cast to the DataProto that the method names.
        """
        return cast(W, _Calls(self))

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Pending[Any]]:
        """Start a method on every worker, each with exactly these arguments; one pending result each.

        Lists are arguments like any other: they are never cut over the workers.
        """
        return self.submit(
            [
                WorkerCall(rank=rank, method=method_name, args=args, kwargs=kwargs)
                for rank in range(self.world_size)
            ]
        )

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """As `execute_all_async`, and wait: the results in rank order."""
        return [pending.result() for pending in self.execute_all_async(method_name, *args, **kwargs)]

    execute_all = execute_all_async
    """verl's short name."""

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Start a method on worker 0."""
        (pending,) = self.submit([WorkerCall(rank=0, method=method_name, args=args, kwargs=kwargs)])
        return pending

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method on worker 0 and wait for its result."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).result()

    execute_rank_zero = execute_rank_zero_async
    """verl's short name."""

    def bound(self, method_name: str) -> Callable[..., Any]:
        """The function that runs a registered method on the group.

        Raises:
            AttributeError: the worker has no such method, or it is not marked; names the marked ones.
        """
        registration = self._registrations.get(method_name)
        if registration is None:
            has = hasattr(self._worker_class, method_name)
            raise AttributeError(
                f"{self._worker_class.__name__}.{method_name} "
                f"{'is not marked with @register' if has else 'does not exist'}, so a worker group cannot "
                f"call it; marked: {', '.join(sorted(self._registrations)) or 'none'}"
            )
        return partial(self._run, method_name, registration)

    def _run(self, method_name: str, registration: Registration, /, *args: Any, **kwargs: Any) -> Any:
        mode, size = registration.mode, self.world_size
        per_rank = self._arguments_of_ranks(method_name, mode, args, kwargs)
        alone = registration.execute_mode is Execute.RANK_ZERO or mode.name == "RANK_ZERO"
        started = output_ranks = list(range(1 if alone else size))
        if not alone and (mode.joins_rows or mode.reporters_only):
            output_ranks = (self.mesh.stages_as_dp if mode.stages_as_dp else self.mesh).output_ranks()
        returns = Returns.ROWS if mode.joins_rows else Returns.VALUE
        returns = Returns.ROWS_AND_METRICS if mode.has_metrics else returns
        pending = self.submit(
            [
                WorkerCall(
                    rank=rank,
                    method=method_name,
                    args=per_rank[rank][0],
                    kwargs=per_rank[rank][1],
                    materialize=registration.materialize_futures,
                    returns=returns if rank in output_ranks else Returns.NOTHING,
                )
                for rank in started
            ]
        )
        outputs = [pending[rank] for rank in output_ranks]
        silent = [
            pending[rank] for rank in started if rank not in output_ranks
        ]  # may fail, and say nothing else
        if mode.collect_fn is not None:
            collect = _first if alone else partial(mode.collect_fn, self)
            future = ResultFuture(outputs, collect, silent, registration.leaves_out_lost and not alone)
            return future.get() if registration.blocking else future
        joined = self.joined(outputs, partition_among([*args, *kwargs.values()]))
        if mode.has_metrics:
            metrics = tuple(metric for output in outputs for metric in self.metrics(output))
            for call in silent:
                call.result()
            return BatchAndMetrics(batch=joined, metrics=metrics)
        if not registration.blocking:
            return joined
        joined.wait()
        for call in silent:
            call.result()
        return joined.get()

    def _arguments_of_ranks(
        self, method_name: str, mode: DispatchMode, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[tuple[Sequence[Any], Mapping[str, Any]]]:
        """Positional and keyword arguments of each worker."""
        size = self.world_size
        per_rank: list[tuple[Sequence[Any], Mapping[str, Any]]] = [(args, kwargs)] * size
        if mode.dispatch_fn is not None:
            positional, keywords = mode.dispatch_fn(self, *args, **kwargs)
            self._check_entries(method_name, mode, [*enumerate(positional), *keywords.items()])
            per_rank = [
                (
                    [entries[rank] for entries in positional],
                    {key: entries[rank] for key, entries in keywords.items()},
                )
                for rank in range(size)
            ]
        arguments = [
            entry for args_of, kwargs_of in per_rank for entry in [*enumerate(args_of), *kwargs_of.items()]
        ]
        for name, arg in arguments:
            if isinstance(arg, Partition):
                raise TypeError(
                    f"argument {name!r} of {method_name} is a Partition, but dispatch mode {mode.name!r} does not "
                    f"cut batches over the data-parallel groups; pass the batch itself"
                )
        return per_rank

    def _check_entries(
        self, method_name: str, mode: DispatchMode, arguments: Sequence[tuple[int | str, Sequence[Any]]]
    ) -> None:
        """Check that a mode returned one entry per worker for each argument."""
        for name, entries in arguments:
            if len(entries) != self.world_size:
                raise ValueError(
                    f"dispatch mode {mode.name!r} gave {len(entries)} entries for argument {name!r} of "
                    f"{method_name}, but the group has {self.world_size} workers; its dispatch_fn returns "
                    f"one entry per worker for each argument"
                )

    if not TYPE_CHECKING:
        # `group.method(...)` works too, as in verl; checked programs go through `call`.
        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            return self.bound(name)


class _Calls:
    """Stands in for a worker; every attribute is a registered method of the group."""

    def __init__(self, group: WorkerGroup[Any]) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._group.bound(name)

    def __dir__(self) -> list[str]:
        return sorted(registrations(self._group._worker_class))


def _first(outputs: list[Any]) -> Any:
    return outputs[0]


def as_list(result: R) -> list[R]:
    """The result of a call whose dispatch mode returns a list, under its true type.

    Raises:
        TypeError: the call did not return a list.
    """
    if not isinstance(result, list):
        raise TypeError(f"this call returned {type(result).__name__}, not a list; its mode joins the results")
    return result
