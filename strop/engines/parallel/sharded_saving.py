"""Sharded checkpoints of several ranks: which parts a rank writes, and what it reads again, for any sharding.

The planners of torch.distributed.checkpoint (DCP) say which part of a DTensor a rank holds and which saved parts make
up the part that it wants. DCP's own storage is not used: its default one needs unpickling; its safetensors one gathers
plans as pickled objects, builds each file in memory, and takes a lost file for a smaller tensor.

Concurrency: ranks do not talk to each other here. Who writes a replicated part follows from names and shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor, Replicate

from strop.engines.checkpoint_reader import Parts, SavedTensor, SavedTensors
from strop.engines.parallel.ranks import Parallel


def parts_of(tensors: Mapping[str, Tensor], parallel: Parallel) -> Parts:
    """Shards that this rank writes; every rank of a stage is called with the same names.

    Raises:
        ValueError: a tensor is a sum over ranks that was not taken yet.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    parts: Parts = {}
    written_here = _written_here(tensors, parallel)
    for item in planner.create_local_plan().items:
        name, form = item.index.fqn, item.tensor_data
        assert form is not None, "only tensors were planned"
        assert name not in parts, "DCP plans one part of a tensor per rank"
        if name in written_here and math.prod(form.chunk.sizes) > 0:
            part = planner.resolve_data(item)
            assert isinstance(part, Tensor), "only tensors were planned"
            parts[name] = (tuple(form.chunk.offsets), part)
    return parts


def load_parts(saved: SavedTensors, tensors: Mapping[str, Tensor]) -> None:
    """Read into this rank's parts of these tensors, in place; each rank reads what its own parts need."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = Metadata({name: _planned(saved.tensors[name]) for name in tensors})
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    for item in planner.create_local_plan().items:
        start, offsets = item.storage_offsets, item.storage_index.offset
        assert offsets is not None, "a part is named by its place"
        box = tuple(slice(at, at + length) for at, length in zip(start, item.lengths, strict=True))
        part = saved.part(item.storage_index.fqn, tuple(offsets))
        planner.resolve_tensor(item).copy_(part[box])


def _planned(saved: SavedTensor) -> TensorStorageMetadata:
    """Metadata of a saved tensor for DCP's planner."""
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)) for offsets, shape in saved.parts.items()
    ]
    return TensorStorageMetadata(TensorProperties(dtype=saved.dtype), torch.Size(saved.shape), chunks)


def _written_here(tensors: Mapping[str, Tensor], parallel: Parallel) -> set[str]:
    """Names of tensors whose part this rank writes, out of all.

    Ranks that hold the same part of a tensor share such tensors out by size. All of them know every name and shape,
    so each comes to the same shares, and nobody asks.
    """
    loads: dict[int, list[int]] = {}
    """Bytes given to each holder, by the number of holders."""
    here = set()
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        index, num_holders = _holder(tensors[name], parallel)
        load = loads.setdefault(num_holders, [0] * num_holders)
        chosen = load.index(min(load))
        load[chosen] += tensors[name].nbytes
        if index == chosen:
            here.add(name)
    return here


def _holder(tensor: Tensor, parallel: Parallel) -> tuple[int, int]:
    """(place of this rank among those that hold the same part, their number); place -1 for a rank without a part."""
    if not isinstance(tensor, DTensor):
        return parallel.rank % parallel.ranks_in_stage, parallel.ranks_in_stage
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    index, num_holders = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            num_holders *= mesh.size(axis)
            index = index * mesh.size(axis) + (0 if coordinate is None else coordinate[axis])
    return (-1 if coordinate is None else index), num_holders
