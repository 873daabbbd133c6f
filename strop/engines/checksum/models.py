"""Digests of the weights of a model, by the names of the one weight map (strop.engines.weights).

Concurrency: the digests of a sharded model are collectives over the ranks of its mesh, called
by all of them in the same order. They read the shards; parameters that were left gathered go back to their shards
first, as `state_dict` of torch does, so they are not called inside TrainEngine.full_parameters().
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from strop.engines.checksum.host import word_sum
from strop.engines.checksum.tensors import WORD_BYTES, finish
from strop.engines.gradients import full, local, meeting_device
from strop.engines.parallel.pipeline import pipeline_of
from strop.engines.weights import WeightsMetadata, named_weights, weights_metadata


def weight_digests(module: nn.Module) -> dict[str, int]:
    """`digest_tensor` of every full weight by name (tied ones once, an adapter's too), without gathering them.

    Each rank reads its own shards and the sums are added up in one small reduction per mesh axis. All ranks of a
    sharded model call this and get the same numbers.
    """
    tensors = named_weights(module, with_adapter=True)
    metadata = weights_metadata(module, with_adapter=True)
    pipeline = pipeline_of(module)
    totals: dict[str, Tensor] = {}
    shared: dict[dist.ProcessGroup, list[str]] = {}
    for weight in metadata:
        if pipeline is not None and not pipeline.is_mine(weight.name):
            totals[weight.name] = torch.zeros((), dtype=torch.int64, device=pipeline.device)
            continue
        tensor = tensors[weight.name].detach()
        check_present(weight.name, tensor)
        shard = _row_shard(tensor)
        if shard is None:
            totals[weight.name] = word_sum(full_weight(tensor, weight.dtype))
        else:
            totals[weight.name] = word_sum(shard.rows, first_byte=shard.first_byte)
            shared.setdefault(shard.group, []).append(weight.name)
    for group, names in shared.items():
        # The sums wrap around modulo 2^64 here as they do inside of one rank.
        added = torch.stack([totals[name] for name in names]).to(meeting_device(tensors[names[0]]))
        dist.all_reduce(added, group=group)
        totals.update(zip(names, added.unbind(), strict=True))
    if pipeline is not None:  # each stage has added up its own
        of_all = torch.stack([totals[weight.name].to(pipeline.device) for weight in metadata])
        dist.all_reduce(of_all, group=pipeline.group)
        totals = {weight.name: total for weight, total in zip(metadata, of_all.unbind(), strict=True)}
    numbers = to_ints([totals[weight.name] for weight in metadata])
    return {
        weight.name: finish(number, weight.num_bytes)
        for weight, number in zip(metadata, numbers, strict=True)
    }


def combine_digests(metadata: WeightsMetadata, digests: Mapping[str, int]) -> str:
    """One digest of a whole model: SHA-256 over names, shapes, dtypes and digests of its weights, as 64 hex digits.

    Tied weights enter under their first name only, so that a model says the same whether the tie is known or not.
    """
    state = hashlib.sha256()
    for weight in metadata:
        line = f"{weight.name} {list(weight.shape)} {dtype_name(weight.dtype)} {digests[weight.name]:016x}\n"
        state.update(line.encode())
    return state.hexdigest()


def digest_weights(module: nn.Module) -> str:
    """`combine_digests` of a model's weights: equal for a sharded and an unsharded model with the same bits.

    An adapter's parameters enter beside the weights it is added to, so every optimizer step shows.
    """
    return combine_digests(weights_metadata(module, with_adapter=True), weight_digests(module))


@torch.no_grad()
def full_weight(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole tensor in this dtype, gathered from its shards where there are any; live memory where possible."""
    return full(tensor.detach().to(dtype))


@dataclass(frozen=True, kw_only=True)
class _RowShard:
    """This rank's rows of a tensor that is sharded by rows over one mesh axis."""

    rows: Tensor
    first_byte: int
    group: dist.ProcessGroup


def _row_shard(tensor: Tensor) -> _RowShard | None:
    """The shard of this rank, if the sums over shards can be added up; None for tensors that are read whole."""
    if not isinstance(tensor, DTensor):
        return None
    cut = _rows_per_rank(tensor)
    if cut is None:
        return None
    (axis, rows_per_rank), mesh = cut, tensor.device_mesh
    bytes_per_rank = rows_per_rank * tensor.shape[1:].numel() * tensor.element_size()
    first_row = min(rows_per_rank * mesh.get_local_rank(axis), tensor.shape[0])
    shard = tensor.to_local()
    if shard.shape[0] != min(rows_per_rank, tensor.shape[0] - first_row):
        raise RuntimeError(
            f"a shard of {list(tensor.shape)} has {shard.shape[0]} rows, but {rows_per_rank} are dealt out at a time"
        )
    first_byte = min(bytes_per_rank * mesh.get_local_rank(axis), tensor.numel() * tensor.element_size())
    if shard.numel() == 0:
        first_byte = 0
    return _RowShard(rows=shard, first_byte=first_byte, group=mesh.get_group(axis))


def _rows_per_rank(tensor: DTensor) -> tuple[int, int] | None:
    """Mesh axis over which rows are dealt out, and how many at a time; None where their sums cannot be added up.

    That is a decision about shapes and placements only, so all ranks come to the same one.
    """
    placements = tensor.placements
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    if len(axes) != 1 or type(placements[axes[0]]) is not Shard or not placements[axes[0]].is_shard(0):
        return None
    # As torch.chunk cuts: all shards but the last ones have this many rows.
    rows_per_rank = -(-tensor.shape[0] // tensor.device_mesh.size(axes[0]))
    is_between_words = rows_per_rank * tensor.shape[1:].numel() * tensor.element_size() % WORD_BYTES == 0
    return (axes[0], rows_per_rank) if is_between_words else None


def to_ints(scalars: Sequence[Tensor]) -> list[int]:
    """The values of many scalars in one transfer per device."""
    values: dict[int, int] = {}
    devices = dict.fromkeys(scalar.device for scalar in scalars)
    for device in devices:
        here = [index for index, scalar in enumerate(scalars) if scalar.device == device]
        values.update(zip(here, torch.stack([scalars[i] for i in here]).tolist(), strict=True))
    return [values[index] for index in range(len(scalars))]


def check_present(name: str, tensor: Tensor) -> None:
    """Raise a ValueError where the values of a weight are elsewhere."""
    shard = local(tensor)
    if shard.numel() and shard.untyped_storage().nbytes() == 0:
        raise ValueError(f"{name} is offloaded; bring the weights back to the device before they are read")


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")
