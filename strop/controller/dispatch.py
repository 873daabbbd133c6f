"""Dispatch modes: distribution of the arguments of a group call over the workers, and collection of their results.

A mode may have a function `dispatch_fn(group, *args, **kwargs)` that returns the arguments again, each one as a
list with an entry per worker. Its results are joined batches, or what `collect_fn(group, outputs)` makes of
the list of outputs. What a mode does depends on its name alone, never on the types or lengths of what is
passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from strop.controller.mesh import Mesh
from strop.controller.partition import Partition
from strop.protocol import DataProto


class HasMesh(Protocol):
    """The part of a worker group that a dispatch mode uses."""

    @property
    def mesh(self) -> Mesh:
        """The parallel axes of the group."""

    @property
    def world_size(self) -> int:
        """Number of workers."""


PerWorker = tuple[tuple[list[Any], ...], dict[str, list[Any]]]
"""Positional and keyword arguments, each as a list with one entry per worker."""
DispatchFn = Callable[..., PerWorker]
CollectFn = Callable[[Any, list[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class DispatchMode:
    """Distribution of one call over the workers and collection of their outputs into one result."""

    name: str
    """The mode's name in messages and in `register`."""
    dispatch_fn: DispatchFn | None = None
    """Arguments of the call -> arguments per worker; none where every worker gets every argument."""
    collect_fn: CollectFn | None = None
    """Outputs of the workers, in rank order -> result of the call; none where `joins_rows`."""
    cuts_rows: bool = False
    """True where each worker sees a part of the rows only, so that one worker is not enough."""
    joins_rows: bool = False
    """True where the workers return batches and the result is their join, in the order of the caller's rows.

    A non-blocking call returns the batch too, whose rows the workers may hold. Only batches of the output ranks
    count.
    """
    has_metrics: bool = False
    """True where `joins_rows`, and each batch comes with metrics: the workers return a `BatchAndMetrics`, and so does
    the call, when all workers have ended."""
    reporters_only: bool = False
    """True where `collect_fn` gets the outputs of `Mesh.output_ranks()` only, in the order of their rows."""
    stages_as_dp: bool = False
    """True where the stages of a pipeline are data-parallel groups of their own (`Mesh.stages_as_dp`)."""

    def __post_init__(self) -> None:
        if self.joins_rows == (self.collect_fn is not None):
            number = "both" if self.joins_rows else "neither"
            raise ValueError(
                f"dispatch mode {self.name!r} has {number} of collect_fn and joins_rows=True; results are "
                f"either made by a function or joined as batches"
            )
        assert self.joins_rows or not self.has_metrics, "metrics without rows are what collect_fn is for"


def one_each(group: HasMesh, *args: Any, **kwargs: Any) -> PerWorker:
    """Every argument is a list with one entry per worker."""
    for name, arg in [*enumerate(args), *kwargs.items()]:
        if not isinstance(arg, list | tuple) or len(arg) != group.world_size:
            actual = f"{len(arg)} entries" if isinstance(arg, list | tuple) else type(arg).__name__
            raise ValueError(
                f"DP_COMPUTE needs a list of {group.world_size} entries, one per worker, for argument "
                f"{name!r}, got {actual}"
            )
    return tuple(list(arg) for arg in args), {name: list(arg) for name, arg in kwargs.items()}


def rows_over_dp(group: HasMesh, *args: Any, **kwargs: Any) -> PerWorker:
    """Batches are cut into one part per data-parallel group; other arguments go to all.

    Parts are those of a `Partition` among the arguments. Without one they differ by at most one row, and are
    empty for the last groups where rows are few. The workers of one group share one object.
    """
    return _rows_over(group.mesh, args, kwargs)


def _rows_over_stages(group: HasMesh, *args: Any, **kwargs: Any) -> PerWorker:
    return _rows_over(group.mesh.stages_as_dp, args, kwargs)


def _rows_over(mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any]) -> PerWorker:
    batches = [arg for arg in [*args, *kwargs.values()] if isinstance(arg, DataProto | Partition)]
    if not batches:
        raise TypeError(
            "this dispatch mode cuts a DataProto over the workers, but the call has none; pass one, or "
            "register the method with Dispatch.ONE_TO_ALL"
        )
    lengths = {len(batch) for batch in batches} if len(batches) > 1 else set()
    if len(lengths) > 1:
        raise ValueError(
            f"batches of one call are cut alike, but they have {sorted(lengths)} rows; join them with union"
        )
    partition = partition_among(batches)
    if partition is not None and len(partition.parts) != mesh.dp:
        raise ValueError(
            f"a Partition has {len(partition.parts)} parts, but the group has {mesh.dp} data-parallel groups; "
            f"give each of them its rows, or an empty part"
        )
    entries_of: dict[object, list[Any]] = {}
    for name, arg in [*enumerate(args), *kwargs.items()]:
        data = arg.data if isinstance(arg, Partition) else arg
        if isinstance(data, DataProto):
            if partition is None:
                parts = data.chunk(mesh.dp)
            else:
                parts = [data.take(part) for part in partition.parts]
            entries_of[name] = [parts[mesh.dp_rank(rank)] for rank in range(mesh.world_size)]
        else:
            entries_of[name] = [data] * mesh.world_size
    return tuple(entries_of[number] for number in range(len(args))), {
        name: entries_of[name] for name in kwargs
    }


def partition_among(arguments: Sequence[Any]) -> Partition | None:
    """The Partition among the arguments of a call, if there is one.

    Raises:
        ValueError: two of them cut differently.
    """
    partitions = [arg for arg in arguments if isinstance(arg, Partition)]
    for partition in partitions[1:]:
        if not partitions[0].same_parts(partition):
            raise ValueError(
                "two arguments of one call are cut into different parts; batches of one call are cut alike"
            )
    return partitions[0] if partitions else None


def _func_and_rows(group: HasMesh, *args: Any, **kwargs: Any) -> PerWorker:
    if not args or not callable(args[0]):
        actual = type(args[0]).__name__ if args else "nothing"
        raise TypeError(
            f"DP_COMPUTE_PROTO_WITH_FUNC needs a function as its first argument, got {actual}; pass the "
            f"function first, or use DP_COMPUTE_PROTO"
        )
    return rows_over_dp(group, *args, **kwargs)


def as_they_are(group: HasMesh, outputs: list[Any]) -> list[Any]:
    """The outputs as a list, in the order in which the mode gets them."""
    return outputs


def _first(group: HasMesh, outputs: list[Any]) -> Any:
    return outputs[0]


class Dispatch(Enum):
    """The built-in modes."""

    RANK_ZERO = DispatchMode(name="RANK_ZERO", collect_fn=_first)
    """The arguments go to worker 0; the result is its result."""
    ONE_TO_ALL = DispatchMode(name="ONE_TO_ALL", collect_fn=as_they_are)
    """Every worker gets the same arguments; the result is the list of results."""
    ALL_TO_ALL = DispatchMode(name="ALL_TO_ALL", collect_fn=as_they_are)
    """Every worker gets the arguments exactly as they were passed, lists included; a list of results."""
    DP_COMPUTE = DispatchMode(name="DP_COMPUTE", dispatch_fn=one_each, collect_fn=as_they_are, cuts_rows=True)
    """Every argument is a list with one entry per worker; the result is the list of results."""
    DP_COMPUTE_PROTO = DispatchMode(
        name="DP_COMPUTE_PROTO", dispatch_fn=rows_over_dp, cuts_rows=True, joins_rows=True
    )
    """Batches are cut over the data-parallel groups, other arguments go to all; results are joined."""
    DP_COMPUTE_PROTO_WITH_FUNC = DispatchMode(
        name="DP_COMPUTE_PROTO_WITH_FUNC", dispatch_fn=_func_and_rows, cuts_rows=True, joins_rows=True
    )
    """As DP_COMPUTE_PROTO, with a function for all workers as the first argument."""
    MEGATRON_COMPUTE_PROTO = DP_COMPUTE_PROTO
    """verl's name of it for workers with tensor and pipeline axes, which the mesh of the role tells here."""
    MEGATRON_PP_AS_DP_PROTO = DispatchMode(
        name="MEGATRON_PP_AS_DP_PROTO",
        dispatch_fn=_rows_over_stages,
        cuts_rows=True,
        joins_rows=True,
        stages_as_dp=True,
    )
    """As DP_COMPUTE_PROTO, but every pipeline stage gets rows of its own: for generation, where each has a whole
    model."""
    DP_COMPUTE_METRIC = DispatchMode(
        name="DP_COMPUTE_METRIC",
        dispatch_fn=rows_over_dp,
        collect_fn=as_they_are,
        cuts_rows=True,
        reporters_only=True,
    )
    """As DP_COMPUTE_PROTO, but the result is the list of results, one per data-parallel group."""
    DP_COMPUTE_PROTO_AND_METRIC = DispatchMode(
        name="DP_COMPUTE_PROTO_AND_METRIC",
        dispatch_fn=rows_over_dp,
        cuts_rows=True,
        joins_rows=True,
        has_metrics=True,
    )
    """As DP_COMPUTE_PROTO, for methods that return a `BatchAndMetrics`: the batches are joined, and their rows stay
    with the workers; of the metrics there is one per data-parallel group."""
    DP_GATHER_PROTO = DispatchMode(name="DP_GATHER_PROTO", joins_rows=True)
    """Every worker gets the same arguments; the batches of the data-parallel groups are joined."""
