"""The global norm of gradients that are whole or sharded over ranks, clipping, and the search for poisoned ones.

Concurrency: with sharded gradients every function here is a collective; all ranks of the mesh call it with the
same parameters in the same order. All ranks get the same result to the last bit, so that they take or skip a step
together.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from strop.engines.cpu.library import are_plain, product_library
from strop.engines.parallel.ranks import gather_json

_CHUNK = 1 << 16
"""Numbers that are squared and added at one time on a CPU: half a MiB in float64, which stays in its cache."""


class Stages(Protocol):
    """Ranks that have the other parameters of the model (`parallel.pipeline.Pipeline`)."""

    @property
    def group(self) -> dist.ProcessGroup:
        """This rank and the others."""
        ...

    @property
    def device(self) -> torch.device:
        """That they talk on."""
        ...

    @property
    def counted_elsewhere(self) -> Collection[str]:
        """Parameters of this rank that another one counts."""
        ...


_Sharding = tuple[DeviceMesh, tuple[int, ...]]
"""A mesh and those of its dimensions over which a tensor is cut into shards."""


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing its memory; the tensor itself where it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole tensor: gathered from all ranks where it is sharded, which all of them must ask for."""
    if not isinstance(tensor, DTensor):
        return tensor
    shard: DTensor = tensor.to(meeting_device(tensor))  # type: ignore[assignment]
    return shard.full_tensor()


def meeting_device(tensor: Tensor) -> torch.device | str:
    """Device on which the ranks that share a tensor can talk, also while its shards are kept in host memory."""
    return tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device


@torch.no_grad()
def total_norm(gradients: Mapping[str, Tensor], stages: Stages | None = None) -> float:
    """L2 norm of all gradients as one vector, over all shards and all stages; the device is waited for once.

    Squares are added in float64, so that the value hardly depends on how many ranks hold the gradients: float32
    sums on a CPU lose three digits on a large matrix.
    """
    shards: dict[_Sharding | None, list[Tensor]] = {}
    for name, gradient in gradients.items():
        if stages is None or name not in stages.counted_elsewhere:
            shards.setdefault(_sharding(gradient), []).append(local(gradient))
    squares = [_reduced(sum_of_squares(tensors), sharding) for sharding, tensors in shards.items()]
    total = reduce(
        lambda some, more: some + more.to(some.device), squares or [torch.zeros((), dtype=torch.float64)]
    )
    if stages is not None:
        total = total.to(stages.device)
        dist.all_reduce(total, group=stages.group)
    return math.sqrt(float(total))


@torch.no_grad()
def scale(gradients: Mapping[str, Tensor], factor: float) -> None:
    """Multiply all gradients in place."""
    if gradients:
        torch._foreach_mul_([local(gradient) for gradient in gradients.values()], factor)


@torch.no_grad()
def non_finite(gradients: Mapping[str, Tensor], stages: Stages | None = None) -> list[str]:
    """Names of the gradients with a NaN or an infinity on any rank, in order; of one stage after the other."""
    names: dict[_Sharding | None, list[str]] = {}
    for name, gradient in gradients.items():
        names.setdefault(_sharding(gradient), []).append(name)
    bad: set[str] = set()
    for sharding, group in names.items():
        is_bad = [not torch.isfinite(local(gradients[name])).all() for name in group]
        flags = _reduced(torch.tensor(is_bad, dtype=torch.float64), sharding, dist.ReduceOp.MAX)
        bad.update(name for name, flag in zip(group, flags.tolist(), strict=True) if flag)
    here = [name for name in gradients if name in bad]
    if stages is None:
        return here
    of_stages: list[list[str]] = gather_json(here, stages.group, stages.device)
    return list(dict.fromkeys(name for names in of_stages for name in names))


def _sharding(tensor: Tensor) -> _Sharding | None:
    if not isinstance(tensor, DTensor):
        return None
    assert not any(p.is_partial() for p in tensor.placements), "FSDP reduces gradients before the step"
    return tensor.device_mesh, tuple(i for i, p in enumerate(tensor.placements) if not p.is_replicate())


def _reduced(
    values: Tensor, sharding: _Sharding | None, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Sums or maxima over the ranks that hold different shards; copies of one shard count once."""
    if sharding is None:
        return values
    mesh, dims = sharding
    values = values.to(mesh.device_type)  # shards may be kept in host memory
    for dim in dims:
        dist.all_reduce(values, op=how, group=mesh.get_group(dim))
    return values


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of the squares of all numbers, a scalar in float64 where they are; nothing is waited for."""
    on_device = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    total = torch.zeros((), dtype=torch.float64)
    if on_device:  # devices add in a tree, which float32 is enough for
        norms = [
            torch.stack(
                torch._foreach_norm(
                    [tensor for tensor in on_device if tensor.dtype == dtype],
                    2,
                    dtype=torch.promote_types(dtype, torch.float32),
                )
            ).double()
            for dtype in {tensor.dtype for tensor in on_device}
        ]
        total = torch.cat(norms).square().sum()
    for tensor in tensors:
        if tensor.device.type == "cpu":
            total = total + _sum_of_squares_here(tensor).to(total.device)
    return total


def _sum_of_squares_here(tensor: Tensor) -> Tensor:
    """The same of a tensor in host memory."""
    flat, library = tensor.reshape(-1), product_library()
    if library is not None and flat.dtype == torch.float32 and are_plain(flat):
        flat = flat.contiguous()
        total = library.sum_of_squares(flat.data_ptr(), len(flat), torch.get_num_threads())
        return torch.tensor(total, dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, len(flat), _CHUNK):
        chunk = flat[start : start + _CHUNK].double()
        total += torch.dot(chunk, chunk)
    return total
