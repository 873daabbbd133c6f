"""Sharded checkpoints: each rank writes its own part of each tensor, and any number of ranks reads them again.

    shard-00001-of-00002.safetensors    the parts of rank 0; offsets of each part in the file's header
    shard-00002-of-00002.safetensors    the parts of rank 1
    state.json                          by rank 0: numbers, and the name, type and shape of every tensor

The planners of torch.distributed.checkpoint (DCP) say which part of a DTensor a rank holds and which saved parts
make up the part that it wants, for any sharding on either side. DCP's own storage is not used: its default one
needs unpickling; its safetensors one gathers plans as pickled objects, builds each file in memory, and takes a lost
file for a smaller tensor. The headers follow DCP's convention, so its `HuggingFaceStorageReader` reads these files.

Concurrency: ranks do not talk to each other here. Who writes a replicated part follows from names and shapes, so a
save needs no collective and can run in a thread beside training. A checkpoint is complete when every rank's save has
returned; who knows that (the controller) seals it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.tensor import DTensor, Replicate

from strop.base.background import in_background
from strop.base.durable import fsync_path, sync_folder, write_durable
from strop.engines.parallel import Parallel
from strop.engines.saved_tensors import DTYPE_NAMES, FORMAT, OFFSETS, STATE_FILE, SavedTensors, shard_name

Parts = dict[str, tuple[torch.Size, Tensor]]
"""What a rank writes: by the name of a tensor, where its part lies in it, and the part."""
_SHOWN_NAMES = 3


def save_sharded(
    folder: Path, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], *, parallel: Parallel
) -> None:
    """Write this rank's part of a checkpoint; every rank calls this with the same names.

    Args:
        folder: made where absent; all ranks see the same one.
        tensors: DTensors of any sharding, or plain tensors that are the same on every rank. Their bits are kept.
        numbers: plain JSON values, the same on every rank.
        parallel: this rank and the number of ranks.

    Raises:
        ValueError, TypeError: something that the format cannot hold.
        OSError, SafetensorError: the disk refused.
    """
    _write(folder, _parts_of(tensors, parallel), _state(tensors, numbers, parallel), parallel)


def save_sharded_async(
    folder: Path, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], *, parallel: Parallel
) -> Future[None]:
    """As `save_sharded`, but returns once the tensors are copied to host memory; a thread writes the copy.

    The copy costs host memory of the size of this rank's parts until they are written.
    """
    state = _state(tensors, numbers, parallel)
    # Not `.cpu()`: on a CPU that is the live tensor itself.
    copies = {
        name: (place, part.detach().to("cpu", copy=True))
        for name, (place, part) in _parts_of(tensors, parallel).items()
    }
    return in_background(lambda: _write(folder, copies, state, parallel), name=f"save {folder.name}")


def load_sharded(
    folder: Path, tensors: Mapping[str, Tensor], *, leave: Collection[str] = ()
) -> dict[str, Any]:
    """Read a checkpoint into these tensors, in place, whatever ranks wrote it; its numbers.

    Each rank reads what its own parts need.

    Args:
        folder: as given to `save_sharded`.
        tensors: DTensors or plain tensors.
        leave: beginnings of the names of saved tensors that may stay unread, such as "optim/".

    Raises:
        ValueError: names, shapes or types differ from the saved ones, or the folder is damaged.
    """
    saved = SavedTensors(folder)
    _compare(saved, tensors, leave)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), saved.metadata(tensors), is_coordinator=True)
    with torch.no_grad():
        for item in planner.create_local_plan().items:
            start = item.storage_offsets
            box = tuple(slice(at, at + length) for at, length in zip(start, item.lengths, strict=True))
            planner.resolve_tensor(item).copy_(saved.part(item.storage_index, box))
    return saved.numbers


def _parts_of(tensors: Mapping[str, Tensor], parallel: Parallel) -> Parts:
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
            parts[name] = (form.chunk.offsets, part)
    return parts


def _written_here(tensors: Mapping[str, Tensor], parallel: Parallel) -> set[str]:
    """Names of tensors whose part this rank writes, out of all.

    Ranks that hold the same part of a tensor share such tensors out by size. All of them know every name and shape,
    so each comes to the same shares, and nobody asks.
    """
    loads: dict[int, list[int]] = {}
    """Bytes given to each holder, by the number of holders."""
    here = set()
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        place, num_holders = _holder(tensors[name], parallel)
        load = loads.setdefault(num_holders, [0] * num_holders)
        chosen = load.index(min(load))
        load[chosen] += tensors[name].nbytes
        if place == chosen:
            here.add(name)
    return here


def _holder(tensor: Tensor, parallel: Parallel) -> tuple[int, int]:
    """(place of this rank among those that hold the same part, their number); place -1 for a rank without a part."""
    if not isinstance(tensor, DTensor):
        return parallel.rank, parallel.world_size
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    place, num_holders = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            num_holders *= mesh.size(axis)
            place = place * mesh.size(axis) + (0 if coordinate is None else coordinate[axis])
    return (-1 if coordinate is None else place), num_holders


def _state(tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], parallel: Parallel) -> str:
    """Content of the state file; what the format cannot hold fails here, before there is any file."""
    for tensor in tensors.values():
        if tensor.dtype not in DTYPE_NAMES:
            known = ", ".join(map(_short, DTYPE_NAMES))
            raise ValueError(f"tensors of type {tensor.dtype} cannot be saved; convert to one of {known}")
    forms = {
        name: {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)}
        for name, tensor in tensors.items()
    }
    content = {
        "format": FORMAT,
        "world_size": parallel.world_size,
        "numbers": dict(numbers),
        "tensors": forms,
    }
    return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _write(folder: Path, parts: Parts, state: str, parallel: Parallel) -> None:
    """Write the parts of this rank. The interpreter is free meanwhile: training goes on beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / shard_name(parallel.rank, parallel.world_size)
    offsets = {name: {"saved_offsets": list(place)} for name, (place, _) in parts.items()}
    save_file(
        {name: part.detach().contiguous() for name, (_, part) in parts.items()},
        path,
        metadata={"format": "pt", OFFSETS: json.dumps(offsets)},
    )
    fsync_path(path)
    if parallel.rank == 0:
        write_durable(folder / STATE_FILE, state)
    sync_folder(folder)


def _compare(saved: SavedTensors, wanted: Mapping[str, Tensor], leave: Collection[str]) -> None:
    """Raise a ValueError that names what differs."""
    missing = [name for name in wanted if name not in saved.tensors]
    extra = [name for name in saved.tensors if name not in wanted and not name.startswith(tuple(leave))]
    other = [
        f"{name} ({_form(held.properties.dtype, held.size)} saved, {_form(tensor.dtype, tensor.shape)} here)"
        for name, tensor in wanted.items()
        if (held := saved.tensors.get(name)) is not None
        and (held.properties.dtype, held.size) != (tensor.dtype, tensor.shape)
    ]
    problems = []
    for names, what in ((missing, "it lacks"), (extra, "nothing here takes"), (other, "of another form:")):
        if names:
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            problems.append(f"{what} {', '.join(names[:_SHOWN_NAMES])}{more}")
    if problems:
        raise ValueError(
            f"checkpoint {saved.folder} does not fit this model: {'; '.join(problems)}; use the model, precision and "
            f"optimizer that it was saved with"
        )


def _form(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{_short(dtype)} {list(shape)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
