"""Sharded checkpoints: each rank writes its own part of each tensor, and any number of ranks reads them again.

    shard-00001-of-00002.safetensors    the parts of rank 0; offsets of each part in the file's header
    shard-00002-of-00002.safetensors    the parts of rank 1
    state.json                          by rank 0: numbers, and the name, type and shape of every tensor

Which part of a tensor each of several ranks holds is said in strop.engines.parallel.sharded_saving. The headers
follow the
convention of torch.distributed.checkpoint, so its `HuggingFaceStorageReader` reads these files.

Concurrency: ranks do not talk to each other here, so a save needs no collective and can run in a thread beside
training. A checkpoint is complete when every rank's save has returned; who knows that (the controller) seals it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from strop.engines.checkpoint_reader import (
    DTYPE_NAMES,
    FORMAT,
    OFFSETS,
    STATE_FILE,
    Parts,
    SavedTensors,
    shard_name,
)
from strop.engines.parallel.ranks import Parallel
from strop.engines.parallel.sharded_saving import load_parts, parts_of
from strop.utils.atomic_io import fsync_path, share_as_usual, sync_folder, write_durable
from strop.utils.background import in_background as run_in_background

_SHOWN_NAMES = 3


Form = tuple[torch.dtype, tuple[int, ...]]
"""Type and shape of a tensor."""


def save_sharded(
    folder: Path,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Any],
    *,
    parallel: Parallel,
    forms: Mapping[str, Form] | None = None,
) -> None:
    """Write this rank's part of a checkpoint; every rank of a stage calls this with the same names.

    Args:
        folder: made where absent; all ranks see the same one.
        tensors: DTensors of any sharding, or plain tensors that are the same on every rank. Their bits are kept.
        numbers: plain JSON values, the same on every rank.
        parallel: this rank and the number of ranks.
        forms: of the tensors of all stages; None: there is one.

    Raises:
        ValueError, TypeError: something that the format cannot hold.
        OSError, SafetensorError: the disk refused.
    """
    _write(
        folder, _parts_of(tensors, parallel), _state(forms or forms_of(tensors), numbers, parallel), parallel
    )


def save_sharded_async(
    folder: Path,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Any],
    *,
    parallel: Parallel,
    forms: Mapping[str, Form] | None = None,
) -> Future[None]:
    """As `save_sharded`, but returns once the tensors are copied to host memory; a thread writes the copy.

    The copy costs host memory of the size of this rank's parts until they are written.
    """
    state = _state(forms or forms_of(tensors), numbers, parallel)
    # Not `.cpu()`: on a CPU that is the live tensor itself.
    copies = {
        name: (offsets, part.detach().to("cpu", copy=True))
        for name, (offsets, part) in _parts_of(tensors, parallel).items()
    }
    return run_in_background(lambda: _write(folder, copies, state, parallel), name=f"save {folder.name}")


def save_parts(
    folder: Path,
    parts: Parts,
    forms: Mapping[str, Form],
    numbers: Mapping[str, Any],
    *,
    parallel: Parallel,
    in_background: bool = False,
) -> Future[None] | None:
    """As `save_sharded`, of parts that the caller has cut: together those of all ranks hold each number once.

    Args:
        folder, numbers, parallel: as of `save_sharded`.
        parts: that this rank writes, in host memory, which nobody changes any more.
        forms: of every tensor of the checkpoint.
        in_background: return at once.

    Returns:
        What is being written, or None when it is written.
    """
    state = _state(forms, numbers, parallel)
    if in_background:
        return run_in_background(lambda: _write(folder, parts, state, parallel), name=f"save {folder.name}")
    _write(folder, parts, state, parallel)
    return None


def open_sharded(folder: Path, forms: Mapping[str, Form], *, leave: Collection[str] = ()) -> SavedTensors:
    """A checkpoint, to read boxes of its tensors; arguments and errors as of `load_sharded` and `save_parts`."""
    saved = SavedTensors(folder)
    _compare(saved, forms, leave)
    return saved


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
    _compare(saved, forms_of(tensors), leave)
    with torch.no_grad():
        if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
            load_parts(saved, tensors)
            return saved.numbers
        for name, tensor in tensors.items():
            for offsets, shape in saved.tensors[name].parts.items():
                box = tuple(slice(at, at + length) for at, length in zip(offsets, shape, strict=True))
                tensor[box].copy_(saved.part(name, offsets))
    return saved.numbers


def _parts_of(tensors: Mapping[str, Tensor], parallel: Parallel) -> Parts:
    if parallel.world_size > 1:
        return parts_of(tensors, parallel)
    return {name: ((0,) * tensor.dim(), tensor) for name, tensor in tensors.items() if tensor.numel()}


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, Form]:
    """Types and shapes, of sharded tensors those of the whole ones."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def _state(forms: Mapping[str, Form], numbers: Mapping[str, Any], parallel: Parallel) -> str:
    """Content of the state file; what the format cannot hold fails here, before there is any file."""
    for dtype, _ in forms.values():
        if dtype not in DTYPE_NAMES:
            names = ", ".join(map(_short, DTYPE_NAMES))
            raise ValueError(f"tensors of type {dtype} cannot be saved; convert to one of {names}")
    named = {
        name: {"dtype": DTYPE_NAMES[dtype], "shape": list(shape)} for name, (dtype, shape) in forms.items()
    }
    content = {
        "format": FORMAT,
        "world_size": parallel.world_size,
        "numbers": dict(numbers),
        "tensors": named,
    }
    return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _write(folder: Path, parts: Parts, state: str, parallel: Parallel) -> None:
    """Write the parts of this rank. The interpreter is free meanwhile: training goes on beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / shard_name(parallel.rank, parallel.world_size)
    offsets = {name: {"saved_offsets": list(start)} for name, (start, _) in parts.items()}
    save_file(
        {name: part.detach().contiguous() for name, (_, part) in parts.items()},
        path,
        metadata={"format": "pt", OFFSETS: json.dumps(offsets)},
    )
    share_as_usual(path)
    fsync_path(path)
    if parallel.rank == 0:
        write_durable(folder / STATE_FILE, state)
    sync_folder(folder)


def _compare(saved: SavedTensors, forms: Mapping[str, Form], leave: Collection[str]) -> None:
    """Raise a ValueError that names what differs."""
    missing = [name for name in forms if name not in saved.tensors]
    extra = [name for name in saved.tensors if name not in forms and not name.startswith(tuple(leave))]
    other = [
        f"{name} ({_form(entry.dtype, entry.shape)} saved, {_form(*form)} here)"
        for name, form in forms.items()
        if (entry := saved.tensors.get(name)) is not None and (entry.dtype, entry.shape) != form
    ]
    problems = []
    for names, label in ((missing, "it lacks"), (extra, "nothing here takes"), (other, "of another form:")):
        if names:
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            problems.append(f"{label} {', '.join(names[:_SHOWN_NAMES])}{more}")
    if problems:
        raise ValueError(
            f"checkpoint {saved.folder} does not fit this model: {'; '.join(problems)}; use the model, precision and "
            f"optimizer that it was saved with"
        )


def _form(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{_short(dtype)} {list(shape)}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
