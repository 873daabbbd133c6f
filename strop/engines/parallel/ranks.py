"""The processes that hold one model together, and what they tell each other.

A role's processes form one torch.distributed group; parameters are sharded over its mesh. Ranks count with tensor
parallelism fastest, then sequence, context and data parallelism, and pipeline stages slowest, as in a group's Mesh
(controller/mesh.py): those of a stage that compute the same rows together are neighbours.

Concurrency: every function that talks to other ranks is a collective, called by all of them in the same order
from one thread. A wait ends with an error after the group's timeout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True, eq=False)
class Parallel:
    """This process among those that hold one model: alone, or one of several ranks (process_group.py)."""

    rank: int = 0
    """Place of this process, from 0."""
    world_size: int = 1
    """Number of processes."""
    device: torch.device
    """Device that this process computes on."""
    sp_size: int = 1
    """Ranks that share each sequence."""
    tp_size: int = 1
    """Ranks over which each matrix of the model is cut."""
    cp_size: int = 1
    """Ranks that share each sequence and exchange keys and values."""
    pp_size: int = 1
    """Stages of the model."""
    mesh: DeviceMesh | None = None
    """Mesh that parameters are sharded over: [shard] or [replicate, shard]; None in one process, without shards."""
    sp_group: dist.ProcessGroup | None = None
    """The ranks that share this rank's sequences; None when sp_size is 1."""
    tp_mesh: DeviceMesh | None = None
    """The ranks that have the other parts of this rank's matrices, in one dimension; None when tp_size is 1."""
    matrix_group: dist.ProcessGroup | None = None
    """The ranks that hold the parts of one copy of a matrix, cut and sharded, in the order of both axes; None when
    tp_size is 1."""
    cp_group: dist.ProcessGroup | None = None
    """The ranks that have the other tokens of this rank's sequences; None when cp_size is 1."""
    row_group: dist.ProcessGroup | None = None
    """The ranks of both groups together, those of a context rank neighbours; None where one of the sizes is 1."""
    pp_groups: tuple[dist.ProcessGroup, ...] | None = None
    """The ranks that run the other stages for this rank's rows, in their order, twice: for collectives and activations,
    and for gradients on their way back. Of two ranks both once more, for what the second one sends; None when pp_size
    is 1."""
    expert_mesh: DeviceMesh | None = None
    """Mesh of the experts, [expert_shard, ep]: sharded over the first dimension, divided over the second; None where
    that is the mesh of all other parameters, with experts undivided and tp_size 1."""
    copy_group: dist.ProcessGroup | None = None
    """The ranks that hold the parts of one copy of the model, where several do: those of other stages, matrices and
    experts, in their order."""

    @property
    def ranks_per_row(self) -> int:
        """Ranks of a stage that compute the same rows together."""
        return self.tp_size * self.sp_size * self.cp_size

    @property
    def pp_rank(self) -> int:
        """Stage of the model that this rank runs."""
        return self.rank // self.ranks_in_stage

    @property
    def ranks_in_stage(self) -> int:
        """Ranks of each stage, which are neighbours."""
        return self.world_size // self.pp_size

    @property
    def dp_rank(self) -> int:
        """Index of the share of the rows that this rank has."""
        return self.rank // self.ranks_per_row % self.dp_size

    @property
    def dp_size(self) -> int:
        """Number of shares of the rows."""
        return self.world_size // (self.ranks_per_row * self.pp_size)

    def max(self, value: int) -> int:
        """The largest value of all ranks."""
        return value

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks of a tensor of the same shape, in host memory."""
        return tensor.detach().cpu()

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather the tensor of each share of the rows, in their order; the same on every rank.

        Args:
            tensor: [n] on any device, n as it comes; equal on ranks that share their rows.

        Returns:
            Tensors [n_share] in host memory, one per share.
        """
        return [tensor.detach().cpu()]

    def barrier(self, label: str) -> None:
        """Wait until every rank is here.

        Raises:
            RuntimeError: a rank did not come; the message says what was waited for.
        """


def alone(device: torch.device | str) -> Parallel:
    """One process with the whole model."""
    return Parallel(device=torch.device(device))


def exchanged(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Rows from all ranks of a group, in their order; `send[r]` of these go to rank r, `receive[r]` come from it."""
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), list(receive), list(send), group=group)
    return received


def gather_json(value: Any, group: dist.ProcessGroup | None, device: torch.device) -> list[Any]:
    """A plain JSON value of each rank of a group, in their order; None: of all ranks. They talk on the device."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    num_ranks = dist.get_world_size(group)
    sizes = torch.zeros(num_ranks, dtype=torch.int64, device=device)
    sizes[dist.get_rank(group)] = len(data)
    dist.all_reduce(sizes, group=group)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=device)
    padded[: len(data)] = data.to(device)
    parts = [torch.empty_like(padded) for _ in range(num_ranks)]
    dist.all_gather(parts, padded, group=group)
    return [json.loads(bytes(part[:size].tolist())) for part, size in zip(parts, sizes.tolist(), strict=True)]
