"""The processes that hold one model together, and what they tell each other.

A role's processes form one torch.distributed group; parameters are sharded over its mesh. Ranks that share a
sequence (sequence parallelism) are neighbours: rank = dp_rank * sp_size + place among them.

Concurrency: every function that talks to other ranks is a collective, called by all of them in the same order
from one thread. A wait ends with an error after the group's timeout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from strop.controller.rendezvous import Rendezvous
from strop.utils.device import device_name, num_devices


@dataclass(frozen=True, kw_only=True, eq=False)
class Parallel:
    """This process among those that hold one model: alone, or one of several ranks (process_group.py)."""

    rank: int = 0
    """Place of this process, from 0."""
    world_size: int = 1
    """Number of processes."""
    device: torch.device
    """What this process computes on."""
    sp_size: int = 1
    """Ranks that share each sequence."""
    mesh: DeviceMesh | None = None
    """What parameters are sharded over: [shard] or [replicate, shard]; None when alone, where nothing is sharded."""
    sp_group: dist.ProcessGroup | None = None
    """The ranks that share this rank's sequences; None when sp_size is 1."""

    @property
    def dp_rank(self) -> int:
        """Which share of the rows this rank has."""
        return self.rank // self.sp_size

    @property
    def dp_size(self) -> int:
        """Number of shares of the rows."""
        return self.world_size // self.sp_size

    def max(self, value: int) -> int:
        """The largest value of all ranks."""
        return value

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """What each share of the rows has, in their order; the same on every rank.

        Args:
            tensor: [n] on any device, n as it comes; equal on ranks that share their rows.

        Returns:
            Tensors [n_share] in host memory, one per share.
        """
        return [tensor.detach().cpu()]

    def barrier(self, what: str) -> None:
        """Wait until every rank is here.

        Raises:
            RuntimeError: a rank did not come; the message says what was waited for.
        """


def alone(device: torch.device | str) -> Parallel:
    """One process with the whole model."""
    return Parallel(device=torch.device(device))


def join_ranks(
    *,
    rank: int,
    world_size: int,
    rendezvous: Rendezvous | None,
    device: str,
    sp_size: int = 1,
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
        shard_size: ranks over which one copy of the parameters is sharded; 0 for all of them, fewer for
            copies on several shard groups (hybrid sharding).
        timeout_s: limit of every wait for other ranks.

    Raises:
        ValueError: sizes that do not divide each other, or a process that is already another rank.
    """
    _check_sizes(rank, world_size, sp_size, shard_size)
    place = _device_of_rank(device, rank)
    if world_size == 1:
        return alone(place)
    from strop.engines.parallel.process_group import joined  # imports Parallel from here

    return joined(
        rank=rank, world_size=world_size, rendezvous=rendezvous, device=place, sp_size=sp_size, shard_size=shard_size,
        timeout_s=timeout_s,
    )  # fmt: skip


def exchanged(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Rows from all ranks of a group, in their order; `send[r]` of these go to rank r, `receive[r]` come from it."""
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=group)
    return received


def _check_sizes(rank: int, world_size: int, sp_size: int, shard_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}, but there are {world_size} ranks, counted from 0")
    for name, size in (("sequence_parallel", sp_size), ("shard_size", shard_size or world_size)):
        if size < 1 or world_size % size:
            raise ValueError(
                f"engine.{name} is {size}, which does not divide the {world_size} ranks of the role; choose one "
                f"of {', '.join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)}"
            )


def _device_of_rank(device: str, rank: int) -> torch.device:
    """The device by name; where none is numbered, ranks take the visible ones in turn."""
    requested, _, number = device.partition(":")
    name = device_name(requested)
    if name == "cpu":
        return torch.device(name)
    place = torch.device(name, int(number) if number else rank % num_devices(name))
    torch.accelerator.set_device_index(place)
    return place
