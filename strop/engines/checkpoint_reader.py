"""A sharded checkpoint on disk, opened for reading; checkpoint.py writes it, and says what its files are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from strop.utils.safe_read import check_regular, parse_json, read_json

STATE_FILE = "state.json"
"""Numbers of a checkpoint, and the name, type and shape of every tensor."""
FORMAT = 1
"""Raised when an older strop could not read what this one writes."""
_MAX_RANKS = 2**17
_MAX_SIZE = 2**48
OFFSETS = "DCP_SHARDING_INFO"
"""Entry of a file's header with the place of each part in its tensor: the name that torch.distributed.checkpoint gives
it."""
Parts = dict[str, tuple[tuple[int, ...], Tensor]]
"""Parts that a rank writes: by the name of a tensor, the place of the part in it, and the part."""
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types of saved tensors, and the words of the safetensors format for them."""
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def shard_name(rank: int, world_size: int) -> str:
    """File of one rank."""
    return f"shard-{rank + 1:05d}-of-{world_size:05d}.safetensors"


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """A whole tensor, and the parts that it is saved in."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """Begin of each part in the tensor, and its shape."""


class SavedTensors:
    """A sharded checkpoint on disk, opened for reading.

    Raises:
        ValueError: it is incomplete or damaged; the message says where.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        state = _read_state(folder)
        self.numbers: dict[str, Any] = state["numbers"]
        self.tensors: dict[str, SavedTensor] = state["tensors"]
        """In the order of the save."""
        self._files: dict[tuple[str, tuple[int, ...]], Any] = {}
        """The open file of each part."""
        for rank in range(state["world_size"]):
            self._index(folder / shard_name(rank, state["world_size"]))
        for name, tensor in self.tensors.items():
            num_saved, size = sum(map(math.prod, tensor.parts.values())), math.prod(tensor.shape)
            if num_saved != size:
                raise ValueError(
                    f"checkpoint {folder} is damaged: its shards hold {num_saved} of the {size} numbers of {name}; "
                    f"restore it from a copy, or use an earlier checkpoint"
                )

    @property
    def num_weights(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def part(self, name: str, offsets: tuple[int, ...]) -> Tensor:
        """The part of a tensor that begins there; pages of the file are read as they are used."""
        part: Tensor = self._files[name, offsets].get_tensor(name)
        return part

    def box(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A box of a tensor, put together from all parts that have some of it."""
        saved = self.tensors[name]
        whole = torch.empty(shape, dtype=saved.dtype)
        for offsets, sizes in saved.parts.items():
            firsts = [max(a, b) for a, b in zip(start, offsets, strict=True)]
            ends = [min(a + n, b + m) for a, n, b, m in zip(start, shape, offsets, sizes, strict=True)]
            if all(first < end for first, end in zip(firsts, ends, strict=True)):
                here, there = (
                    tuple(
                        slice(first - at, end - at)
                        for first, end, at in zip(firsts, ends, origin, strict=True)
                    )
                    for origin in (start, offsets)
                )
                whole[here] = self.part(name, offsets)[there]
        return whole

    def _opened(self, path: Path) -> Any:
        try:
            check_regular(path)
            return safe_open(path, framework="pt")
        except FileNotFoundError:
            raise ValueError(
                f"checkpoint {self.folder} is incomplete: {path.name} is missing; copy it with all its files, "
                f"or use an earlier checkpoint"
            ) from None
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"checkpoint {self.folder} is damaged: {path.name} cannot be read ({error}); restore it from a "
                f"copy, or use an earlier checkpoint"
            ) from error

    def _offsets(self, path: Path, text: str) -> dict[str, tuple[int, ...]]:
        """Places of the parts in a file in their tensors."""
        try:
            entries = parse_json(text)
            offsets_by_name = {name: entry["saved_offsets"] for name, entry in entries.items()}
        except (ValueError, AttributeError, KeyError, TypeError):
            offsets_by_name = {"": None}
        if not all(map(_are_sizes, offsets_by_name.values())):
            raise ValueError(
                f"checkpoint {self.folder} is damaged: {path.name} does not say where its parts belong ({OFFSETS})"
            )
        return {name: tuple(offsets) for name, offsets in offsets_by_name.items()}

    def _index(self, path: Path) -> None:
        """Note the parts in a file."""
        file = self._opened(path)
        offsets = self._offsets(path, (file.metadata() or {}).get(OFFSETS, "{}"))
        for name in file.keys():  # noqa: SIM118  (not a dictionary)
            saved = file.get_slice(name)
            offset, shape = offsets.get(name, ()), tuple(saved.get_shape())
            tensor = self.tensors.get(name)
            if tensor is None or not _fits(tensor, saved.get_dtype(), offset, shape):
                raise ValueError(
                    f"checkpoint {self.folder} is damaged: {path.name} holds a part of {name} that {STATE_FILE} does "
                    f"not describe; files of two checkpoints were mixed"
                )
            if offset not in tensor.parts:
                tensor.parts[offset] = shape
                self._files[name, offset] = file


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < _MAX_SIZE for size in value)


def _fits(tensor: SavedTensor, dtype: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    is_inside = len(offset) == len(shape) == len(tensor.shape) and all(
        at + size <= limit for at, size, limit in zip(offset, shape, tensor.shape, strict=True)
    )
    return is_inside and dtype == DTYPE_NAMES[tensor.dtype]


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state = read_json(folder / STATE_FILE)
    except FileNotFoundError:
        raise ValueError(
            f"{folder} holds no sharded checkpoint: it has no {STATE_FILE}, which the save writes last"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"checkpoint {folder} is damaged: {STATE_FILE} cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise ValueError(f"checkpoint {folder} is damaged: {STATE_FILE} holds a {type(state).__name__}")
    if state.get("format") != FORMAT:
        raise ValueError(
            f"checkpoint {folder} has format {state.get('format')}, this strop reads format {FORMAT}: use the strop "
            f"that wrote it"
        )
    tensors, world_size = state.get("tensors"), state.get("world_size")
    if not (
        isinstance(state.get("numbers"), dict)
        and isinstance(tensors, dict)
        and type(world_size) is int
        and 0 < world_size <= _MAX_RANKS
    ):
        raise ValueError(
            f"checkpoint {folder} is damaged: {STATE_FILE} lacks numbers, tensors or world_size, or has them in "
            f"another form"
        )
    return {**state, "tensors": {name: _form(folder, name, entry) for name, entry in tensors.items()}}


def _form(folder: Path, name: str, entry: object) -> SavedTensor:
    """A tensor as the state file describes it."""
    form = entry if isinstance(entry, dict) else {}
    dtype, shape = form.get("dtype"), form.get("shape")
    if not isinstance(dtype, str) or not _are_sizes(shape):
        raise ValueError(f"checkpoint {folder} is damaged: {STATE_FILE} gives {name} no type and shape")
    if dtype not in DTYPES:
        raise ValueError(
            f"checkpoint {folder} is damaged: {STATE_FILE} gives {name} the unknown type {dtype!r}; known: "
            f"{', '.join(DTYPES)}"
        )
    return SavedTensor(dtype=DTYPES[dtype], shape=tuple(shape))
