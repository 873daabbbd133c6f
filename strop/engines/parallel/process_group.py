"""The process group of a role: joined, divided into meshes, and left."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from strop.controller.rendezvous import Rendezvous
from strop.engines.config import EngineConfig
from strop.engines.parallel.axes import check_axes
from strop.engines.parallel.ranks import Parallel, alone
from strop.utils import timeline
from strop.utils.device import collective_backend, device_name, num_devices

_STORES: list[Any] = []
"""Of this process's group, if it has one."""


def _waiting() -> AbstractContextManager[None]:
    """Context of a collective over all ranks: its time is that until the last of them has come."""
    return timeline.span("waits for other ranks", "wait")


class Ranks(Parallel):
    """One of several ranks."""

    def max(self, value: int) -> int:
        """As `Parallel.max`."""
        tensor = torch.tensor(value)  # host memory: no wait for the device
        with _waiting():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def sum(self, tensor: Tensor) -> Tensor:
        """As `Parallel.sum`."""
        added = tensor.detach().cpu().clone()
        with _waiting():
            dist.all_reduce(added)
        return added

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """As `Parallel.gather`."""
        share = tensor.detach().cpu()
        longest = self.max(len(share))
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(share)
        with _waiting():
            dist.all_reduce(sizes)
        padded = torch.zeros(longest, dtype=share.dtype)
        padded[: len(share)] = share
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        with _waiting():
            dist.all_gather(parts, padded)
        firsts = range(0, self.world_size // self.pp_size, self.ranks_per_row)
        return [parts[rank][: int(sizes[rank])] for rank in firsts]

    def barrier(self, label: str) -> None:
        """As `Parallel.barrier`."""
        try:
            with _waiting():
                dist.all_reduce(torch.zeros(1))
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} of {self.world_size} waited for the others at {label!r}, and not all came: "
                f"{str(error).strip().splitlines()[0]}"
            ) from error


def join_ranks(
    *,
    rank: int,
    world_size: int,
    rendezvous: Rendezvous | None,
    device: str,
    engine: EngineConfig | None = None,
    timeout_s: float = 600.0,
) -> Parallel:
    """Join the other processes of a role; all of them call this.

    Several roles of one process share the process group, which is made once; their meshes may differ.

    Args:
        rank, world_size: this process and the number of processes.
        rendezvous: where they find each other; None where there is one process.
        device: `auto` or a device name, with or without a number.
        engine: says how the ranks divide rows, sequences and the model; None: rows alone.
        timeout_s: limit of every wait for other ranks.

    Raises:
        ValueError: sizes that do not divide each other, or a process that is already another rank.
    """
    engine = engine or EngineConfig()
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, but there are {world_size} ranks, counted from 0")
    check_axes(engine, world_size)
    rank_device = _device_of_rank(device, rank)
    if world_size == 1:
        return alone(rank_device)
    return joined(
        rank=rank, world_size=world_size, rendezvous=rendezvous, device=rank_device, engine=engine,
        timeout_s=timeout_s,
    )  # fmt: skip


def joined(
    *,
    rank: int,
    world_size: int,
    rendezvous: Rendezvous | None,
    device: torch.device,
    engine: EngineConfig,
    timeout_s: float,
) -> Ranks:
    """As `join_ranks`, on this device and with at least two ranks."""
    if not dist.is_initialized():
        _initialize(rank, world_size, rendezvous, device, timeout_s)
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise ValueError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already and cannot also be rank "
            f"{rank} of {world_size}; roles in one process need the same ranks"
        )
    meshes = _Meshes(engine, device.type, world_size)
    return Ranks(
        rank=rank,
        world_size=world_size,
        device=device,
        tp_size=engine.tensor_parallel,
        sp_size=engine.sequence_parallel,
        cp_size=engine.context_parallel,
        pp_size=engine.pipeline_parallel,
        mesh=meshes.of_parameters["replicate", "shard"]
        if meshes.num_copies > 1
        else meshes.of_parameters["shard"],
        sp_group=meshes.group_of_rows("sp"),
        tp_mesh=meshes.of_parameters["tp"] if engine.tensor_parallel > 1 else None,
        matrix_group=meshes.group_of_matrices(),
        cp_group=meshes.group_of_rows("cp"),
        row_group=meshes.group_of_both(),
        pp_groups=_stage_groups(engine.pipeline_parallel, world_size, timeout_s),
        expert_mesh=meshes.of_experts,
        copy_group=_copy_group(
            engine.pipeline_parallel,
            math.lcm(engine.tensor_parallel, engine.expert_parallel),
            world_size,
            timeout_s,
        ),
    )


def leave_ranks() -> None:
    """End this process's part in its group, if it has one; models sharded over it cannot be used any more."""
    _mesh.cache_clear()
    _stage_groups.cache_clear()
    _copy_group.cache_clear()
    # Results that DTensor remembers hold meshes, which are equal to those of a later group.
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    if dist.is_initialized():
        dist.destroy_process_group()
    while _STORES:
        _STORES.pop().close()


class _Meshes:
    """Meshes over all ranks of a role, each with pipeline stages slowest; axes of one rank are left out."""

    def __init__(self, engine: EngineConfig, device_type: str, world_size: int) -> None:
        pp, tp, sp, cp = (
            engine.pipeline_parallel,
            engine.tensor_parallel,
            engine.sequence_parallel,
            engine.context_parallel,
        )
        of_stage = world_size // pp
        self._num_stages, self._tp = pp, tp
        num_shards = self._num_shards = engine.shard_size or of_stage // tp
        self.num_copies = of_stage // tp // num_shards
        self._device_type = device_type
        self._rows = {"pp": pp, "dp": of_stage // (tp * sp * cp), "cp": cp, "sp": sp, "tp": tp}
        self.of_parameters = self._mesh(
            {"pp": pp, "replicate": self.num_copies, "shard": num_shards, "tp": tp}, needed=("shard",)
        )
        self.of_experts: DeviceMesh | None = None
        ep = engine.expert_parallel
        if ep > 1 or tp > 1:
            axes = {"pp": pp, "expert_shard": of_stage // ep, "ep": ep}
            self.of_experts = self._mesh(axes, needed=("expert_shard", "ep"))["expert_shard", "ep"]

    def group_of_rows(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks along one of the axes of rows; None where that is this rank alone."""
        return self._mesh(self._rows).get_group(axis) if self._rows[axis] > 1 else None

    def group_of_matrices(self) -> dist.ProcessGroup | None:
        """The ranks that hold the parts of one copy of a matrix; None where it is cut along one axis alone."""
        if self._tp == 1:
            return None
        axes = {"pp": self._num_stages, "replicate": self.num_copies, "matrix": self._num_shards * self._tp}
        return self._mesh(axes).get_group("matrix")

    def group_of_both(self) -> dist.ProcessGroup | None:
        """The ranks along both axes of tokens; None where one of them is this rank alone."""
        sizes = dict(self._rows)
        cp, sp = sizes.pop("cp"), sizes.pop("sp")
        if 1 in (cp, sp):
            return None
        axes = {"pp": sizes["pp"], "dp": sizes["dp"], "row": cp * sp, "tp": sizes["tp"]}
        return self._mesh(axes).get_group("row")

    def _mesh(self, axes: Mapping[str, int], needed: Sequence[str] = ()) -> DeviceMesh:
        sizes = {name: size for name, size in axes.items() if size > 1 or name in needed}
        return _mesh(self._device_type, tuple(sizes.values()), tuple(sizes))


def _device_of_rank(device: str, rank: int) -> torch.device:
    """The device by name; where none is numbered, ranks take the visible ones in turn."""
    requested, _, number = device.partition(":")
    name = device_name(requested)
    if name == "cpu":
        return torch.device(name)
    rank_device = torch.device(name, int(number) if number else rank % num_devices(name))
    torch.accelerator.set_device_index(rank_device)
    return rank_device


def _initialize(
    rank: int, world_size: int, rendezvous: Rendezvous | None, device: torch.device, timeout_s: float
) -> None:
    if rendezvous is None:
        raise ValueError(
            f"rank {rank} of {world_size} was not told where the ranks meet; the runtime that starts the processes "
            f"must open a strop.controller.store_server.RendezvousServer and hand its `rendezvous` on"
        )
    backend = collective_backend(device.type)
    if device.type != "cpu":
        # Small facts travel between hosts and need no device.
        backend = f"cpu:{collective_backend('cpu')},{device.type}:{backend}"
    store = rendezvous.join(timeout_s=timeout_s)
    _STORES.append(store)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


@cache
def _mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh per shape and process, so that roles share its groups."""
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


@cache
def _stage_groups(num_stages: int, world_size: int, timeout_s: float) -> tuple[dist.ProcessGroup, ...] | None:
    """Groups of the ranks that run the stages for the same rows, as `Parallel.pp_groups` has them."""
    if num_stages == 1:
        return None
    in_stage = world_size // num_stages
    timeout = datetime.timedelta(seconds=timeout_s)
    groups = [
        tuple(dist.new_group(ranks, timeout=timeout) for _ in range(4 if num_stages == 2 else 2))
        for ranks in (list(range(first, world_size, in_stage)) for first in range(in_stage))
    ]
    return groups[dist.get_rank() % in_stage]


@cache
def _copy_group(
    num_stages: int, in_stage: int, world_size: int, timeout_s: float
) -> dist.ProcessGroup | None:
    """The ranks that hold one copy of the model, so many neighbours of each stage; None where each has all of it."""
    if num_stages * in_stage == 1:
        return None
    timeout, ranks_of_stage = datetime.timedelta(seconds=timeout_s), world_size // num_stages
    groups: list[dist.ProcessGroup] = []
    for first in range(0, ranks_of_stage, in_stage):
        starts = range(first, world_size, ranks_of_stage)
        ranks = [start + index for start in starts for index in range(in_stage)]
        groups.append(dist.new_group(ranks, timeout=timeout))
    return groups[dist.get_rank() % ranks_of_stage // in_stage]
