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
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor, Replicate

from strop.engines.parallel import Parallel
from strop.engines.saved_tensors import FORMAT, OFFSETS, STATE_FILE, SavedTensors, shard_name
from strop.engines.tensor_files import (
    TensorInfo,
    aligned_order,
    dtype_name,
    info_of,
    write_json,
    write_tensors,
)

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
        OSError: the disk refused.
    """
    _write(folder, _parts_of(tensors, parallel), _state(tensors, numbers, parallel), parallel)


def save_sharded_async(
    folder: Path, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], *, parallel: Parallel
) -> PendingSave:
    """As `save_sharded`, but returns once the tensors are copied to host memory; a thread writes the copy.

    The copy costs host memory of the size of this rank's parts until they are written.
    """
    state = _state(tensors, numbers, parallel)
    # Not `.cpu()`: on a CPU that is the live tensor itself.
    copies = {
        key: (item, part.detach().to("cpu", copy=True))
        for key, (item, part) in _parts_of(tensors, parallel).items()
    }
    return PendingSave(folder, copies, state, parallel)


class PendingSave:
    """One rank's save that is being written by a thread."""

    def __init__(
        self,
        folder: Path,
        parts: dict[str, tuple[WriteItem, Tensor]],
        state: dict[str, Any],
        parallel: Parallel,
    ) -> None:
        self.folder = folder
        self.num_bytes = sum(info_of(tensor).num_bytes for _, tensor in parts.values())
        """Bytes of this rank's parts."""
        self._error: Exception | None = None
        self._ended = threading.Event()
        # A daemon: a process that must end does not wait for a disk that hangs. Whoever needs the files asks
        # for the result.
        thread = threading.Thread(
            target=self._work, args=(parts, state, parallel), name=f"save {folder.name}", daemon=True
        )
        thread.start()

    def _work(
        self, parts: dict[str, tuple[WriteItem, Tensor]], state: dict[str, Any], parallel: Parallel
    ) -> None:
        try:
            _write(self.folder, parts, state, parallel)
        except Exception as error:  # noqa: BLE001  (raised again in `result`)
            self._error = error
        finally:
            self._ended.set()

    def done(self) -> bool:
        """True once it is written, or has failed."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> None:
        """Wait until this rank's part is on the disk.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            TimeoutError: it takes longer.
            OSError: the disk refused; the files are of no use.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(
                f"writing {self.num_bytes / 2**30:.2f} GiB of a checkpoint to {self.folder} takes longer than "
                f"{timeout:g} s; check the disk, or allow more time"
            )
        if self._error is not None:
            raise self._error


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
    _compare(folder, saved.tensors, tensors, leave)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), saved.metadata(tensors), is_coordinator=True)
    with torch.no_grad():
        for item in planner.create_local_plan().items:
            start = item.storage_offsets
            box = tuple(slice(at, at + length) for at, length in zip(start, item.lengths, strict=True))
            planner.resolve_tensor(item).copy_(saved.part(item.storage_index, box))
    return saved.numbers


def _parts_of(tensors: Mapping[str, Tensor], parallel: Parallel) -> dict[str, tuple[WriteItem, Tensor]]:
    """What this rank writes: (DCP's description, local part) by name, in the order of the file."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    parts: dict[str, tuple[WriteItem, Tensor]] = {}
    written_here = _written_here(tensors, parallel)
    for item in planner.create_local_plan().items:
        name, form = item.index.fqn, item.tensor_data
        assert form is not None, "only tensors were planned"
        assert name not in parts, "DCP plans one part of a tensor per rank"
        if name in written_here and math.prod(form.chunk.sizes) > 0:
            part = planner.resolve_data(item)
            assert isinstance(part, Tensor), "only tensors were planned"
            parts[name] = (item, part)
    layout = {name: info_of(part) for name, (_, part) in parts.items()}
    return {name: parts[name] for name in aligned_order(layout)}


def _written_here(tensors: Mapping[str, Tensor], parallel: Parallel) -> set[str]:
    """Names of tensors whose part this rank writes, out of all.

    Ranks that hold the same part of a tensor share such tensors out by size. All of them know every name and shape,
    so each comes to the same shares, and nobody asks.
    """
    loads: dict[int, list[int]] = {}
    """Bytes given to each holder, by the number of holders."""
    here = set()
    for name in sorted(tensors, key=lambda name: (-info_of(tensors[name]).num_bytes, name)):
        place, num_holders = _holder(tensors[name], parallel)
        load = loads.setdefault(num_holders, [0] * num_holders)
        chosen = load.index(min(load))
        load[chosen] += info_of(tensors[name]).num_bytes
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


def _state(tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], parallel: Parallel) -> dict[str, Any]:
    """Content of the state file. A round trip through JSON: what the format cannot hold fails before any file."""
    text = json.dumps(
        {
            "format": FORMAT,
            "world_size": parallel.world_size,
            "numbers": dict(numbers),
            "tensors": {
                name: {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
                for name, tensor in tensors.items()
            },
        },
        allow_nan=False,
    )
    state: dict[str, Any] = json.loads(text)
    return state


def _write(
    folder: Path, parts: dict[str, tuple[WriteItem, Tensor]], state: Mapping[str, Any], parallel: Parallel
) -> None:
    """Write and use up the parts of this rank."""
    folder.mkdir(parents=True, exist_ok=True)
    layout = {name: info_of(part) for name, (_, part) in parts.items()}
    offsets = {name: {"saved_offsets": list(item.index.offset or ())} for name, (item, _) in parts.items()}
    write_tensors(
        folder / shard_name(parallel.rank, parallel.world_size),
        layout,
        (parts.pop(name)[1] for name in list(parts)),  # a copy's memory is free as soon as it is written
        metadata={"format": "pt", OFFSETS: json.dumps(offsets)},
    )
    if parallel.rank == 0:
        write_json(folder / STATE_FILE, state)


def _compare(
    folder: Path, saved: Mapping[str, TensorInfo], wanted: Mapping[str, Tensor], leave: Collection[str]
) -> None:
    """Raise a ValueError that names what differs."""
    missing = [name for name in wanted if name not in saved]
    extra = [name for name in saved if name not in wanted and not name.startswith(tuple(leave))]
    forms = {name: info_of(tensor) for name, tensor in wanted.items()}
    other = [
        f"{name} ({_form(saved[name])} saved, {_form(form)} here)"
        for name, form in forms.items()
        if name in saved and saved[name] != form
    ]
    problems = []
    for names, what in ((missing, "it lacks"), (extra, "nothing here takes"), (other, "of another form:")):
        if names:
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            problems.append(f"{what} {', '.join(names[:_SHOWN_NAMES])}{more}")
    if problems:
        raise ValueError(
            f"checkpoint {folder} does not fit this model: {'; '.join(problems)}; use the model, precision and "
            f"optimizer that it was saved with"
        )


def _form(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {list(info.shape)}"
