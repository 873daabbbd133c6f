"""The process group of a role: joined, divided into meshes, and left."""

from __future__ import annotations

import datetime
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from strop.controller.rendezvous import Rendezvous
from strop.engines.parallel.ranks import Parallel, alone
from strop.utils.device import collective_backend, device_name, num_devices

_STORES: list[Any] = []
"""Of this process's group, if it has one."""


class Ranks(Parallel):
    """One of several ranks."""

    def max(self, value: int) -> int:
        """As `Parallel.max`."""
        tensor = torch.tensor(value)  # host memory: no wait for the device
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """As `Parallel.gather`."""
        share = tensor.detach().cpu()
        longest = self.max(len(share))
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(share)
        dist.all_reduce(sizes)
        padded = torch.zeros(longest, dtype=share.dtype)
        padded[: len(share)] = share
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(parts, padded)
        firsts = range(0, self.world_size, self.ranks_per_row)
        return [parts[rank][: int(sizes[rank])] for rank in firsts]

    def barrier(self, label: str) -> None:
        """As `Parallel.barrier`."""
        try:
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
    sp_size: int = 1,
    tp_size: int = 1,
    shard_size: int = 0,
    timeout_s: float = 600.0,
) -> Parallel:
    """Join the other processes of a role; all of them call this.

    Several roles of one process share the process group, which is made once; their meshes may differ.

    Args:
        rank, world_size: this process and the number of processes.
        rendezvous: where they find each other; None where there is one process.
        device: `auto` or a device name, with or without a number.
        sp_size: ranks that share each sequence.
        tp_size: ranks over which each matrix is cut; 1 where sp_size is not.
        shard_size: ranks over which one copy of the parameters is sharded; 0 for all of them, fewer for
            copies on several shard groups (hybrid sharding).
        timeout_s: limit of every wait for other ranks.

    Raises:
        ValueError: sizes that do not divide each other, or a process that is already another rank.
    """
    _check_sizes(rank, world_size, sp_size, tp_size, shard_size)
    rank_device = _device_of_rank(device, rank)
    if world_size == 1:
        return alone(rank_device)
    return joined(
        rank=rank, world_size=world_size, rendezvous=rendezvous, device=rank_device, sp_size=sp_size,
        tp_size=tp_size, shard_size=shard_size, timeout_s=timeout_s,
    )  # fmt: skip


def joined(
    *,
    rank: int,
    world_size: int,
    rendezvous: Rendezvous | None,
    device: torch.device,
    sp_size: int,
    tp_size: int = 1,
    shard_size: int,
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
    num_shards = shard_size or world_size // tp_size
    sizes = {"replicate": world_size // tp_size // num_shards, "shard": num_shards, "tp": tp_size}
    axes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    mesh = _mesh(device.type, tuple(axes.values()), tuple(axes))
    sp_group, tp_mesh = None, None
    if sp_size > 1:
        sp_group = _mesh(device.type, (world_size // sp_size, sp_size), ("dp", "sp")).get_group("sp")
    if tp_size > 1:
        tp_mesh = mesh["tp"]
        mesh = mesh[tuple(name for name in axes if name != "tp")]
    return Ranks(
        rank=rank, world_size=world_size, device=device, sp_size=sp_size, tp_size=tp_size, mesh=mesh,
        sp_group=sp_group, tp_mesh=tp_mesh,
    )  # fmt: skip


def leave_ranks() -> None:
    """End this process's part in its group, if it has one; models sharded over it cannot be used any more."""
    _mesh.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    while _STORES:
        _STORES.pop().close()


def _check_sizes(rank: int, world_size: int, sp_size: int, tp_size: int, shard_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, but there are {world_size} ranks, counted from 0")
    if sp_size > 1 and tp_size > 1:
        raise ValueError(
            f"engine.sequence_parallel is {sp_size} and engine.tensor_parallel is {tp_size} in this role, which "
            f"both share the tokens of a sequence out: set one of them to 1"
        )
    per_matrix = world_size // tp_size if tp_size else 0
    for name, size, ranks in (
        ("sequence_parallel", sp_size, world_size),
        ("tensor_parallel", tp_size, world_size),
        ("shard_size", shard_size or per_matrix, per_matrix),
    ):
        if size < 1 or ranks % size:
            raise ValueError(
                f"engine.{name} is {size}, which does not divide the {ranks} ranks of the role; choose one "
                f"of {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}"
            )


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
