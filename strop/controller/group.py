"""A worker group: all workers of a role, called as if they were one.

The controller calls `group.call.method(...)`; the registration of the method says how the arguments reach
the workers and how the results become one. A runtime implements `submit`, the one way into a worker, and
answers for the deadline of what it returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from strop.controller.mesh import Mesh
from strop.controller.registration import Execute, Registration, registrations
from strop.controller.worker import Worker
from strop.protocol import DataProto, DataProtoFuture, Pending

W = TypeVar("W", bound=Worker)
R = TypeVar("R")


@dataclass(frozen=True)
class ResultFuture:
    """The result of a non-blocking call that is no joined batch."""

    parts: Sequence[Pending[Any]]
    """What each worker computes."""
    collect: Callable[[list[Any]], Any]
    """Makes one result of the outputs."""

    def get(self) -> Any:
        """Wait for all workers; what the blocking call would have returned."""
        return self.collect([part.result() for part in self.parts])


class WorkerGroup(ABC, Generic[W]):
    """All workers of one role, under the worker's own type."""

    def __init__(self, worker_class: type[W], mesh: Mesh) -> None:
        self._worker_class = worker_class
        self._mesh = mesh
        self._registrations = registrations(worker_class)

    @abstractmethod
    def submit(
        self, rank: int, method_name: str, args: Sequence[Any], kwargs: dict[str, Any], *, materialize: bool
    ) -> Pending[Any]:
        """Start a method on one worker; `materialize` turns futures among the arguments into batches."""

    @property
    def mesh(self) -> Mesh:
        """The parallel axes of the group."""
        return self._mesh

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._mesh.world_size

    @property
    def call(self) -> W:
        """The group under the worker's type: its registered methods run on the workers.

        The annotations are those of the method. Where the dispatch mode returns a list, or the method is
        registered with blocking=False, `as_list` and `as_future` tell the type checker so.
        """
        return cast(W, _Calls(self))

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Pending[Any]]:
        """Start a method on every worker, each with exactly these arguments; one pending result each.

        Lists are arguments like any other: they are never cut over the workers.
        """
        return [
            self.submit(rank, method_name, args, kwargs, materialize=True) for rank in range(self.world_size)
        ]

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """As `execute_all_async`, and wait: the results in rank order."""
        return [pending.result() for pending in self.execute_all_async(method_name, *args, **kwargs)]

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Pending[Any]]:
        """The same as `execute_all_async`, under the field's short name."""
        return self.execute_all_async(method_name, *args, **kwargs)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Start a method on worker 0."""
        return self.submit(0, method_name, args, kwargs, materialize=True)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method on worker 0 and wait for its result."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).result()

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Pending[Any]:
        """The same as `execute_rank_zero_async`, under the field's short name."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs)

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

        def run(*args: Any, **kwargs: Any) -> Any:
            return self._run(method_name, registration, args, kwargs)

        return run

    def _run(
        self, method_name: str, registration: Registration, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        mode = registration.mode
        alone = registration.execute_mode is Execute.RANK_ZERO or mode.name == "RANK_ZERO"
        args_per_worker, kwargs_per_worker = mode.dispatch_fn(self, *args, **kwargs)
        for name, entries in [*enumerate(args_per_worker), *kwargs_per_worker.items()]:
            if len(entries) != self.world_size:
                raise ValueError(
                    f"dispatch mode {mode.name!r} gave {len(entries)} entries for argument {name!r} of "
                    f"{method_name}, but the group has {self.world_size} workers; its dispatch_fn returns "
                    f"one entry per worker for each argument"
                )
        pending = [
            self.submit(
                rank,
                method_name,
                [entries[rank] for entries in args_per_worker],
                {name: entries[rank] for name, entries in kwargs_per_worker.items()},
                materialize=registration.materialize_futures,
            )
            for rank in range(1 if alone else self.world_size)
        ]
        if not registration.blocking and mode.joins_rows:
            return DataProtoFuture(tuple(pending[rank] for rank in self.mesh.reporters()))

        def collect(outputs: list[Any]) -> Any:
            return outputs[0] if alone else mode.collect_fn(self, outputs)

        future = ResultFuture(pending, collect)
        return future.get() if registration.blocking else future

    if not TYPE_CHECKING:
        # `group.method(...)` works too, as in the field; checked programs go through `call`.
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


def as_list(result: R) -> list[R]:
    """The result of a call whose dispatch mode returns a list, under its true type.

    Raises:
        TypeError: the call did not return a list.
    """
    if not isinstance(result, list):
        raise TypeError(f"this call returned {type(result).__name__}, not a list; its mode joins the results")
    return result


def as_future(result: DataProto) -> DataProtoFuture:
    """The result of a non-blocking call that joins batches, under its true type.

    Raises:
        TypeError: the call did not return a DataProtoFuture.
    """
    held: object = result
    if not isinstance(held, DataProtoFuture):
        raise TypeError(
            f"this call returned {type(held).__name__}, not a DataProtoFuture; register the method with "
            f"blocking=False and a mode that joins batches"
        )
    return held
