"""A sharded checkpoint on disk, opened for reading; checkpoint.py says what its files are."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from strop.base.foreign_files import check_regular, parse_json, read_json
from strop.engines.tensor_files import TensorInfo, dtype_named

STATE_FILE = "state.json"
"""Numbers of a checkpoint, and the name, type and shape of every tensor."""
FORMAT = 1
"""Raised when an older strop could not read what this one writes."""
_MAX_RANKS = 2**17
_MAX_SIZE = 2**48
OFFSETS = "DCP_SHARDING_INFO"
"""Entry of a file's header with the place of each part in its tensor: the name that DCP gives it."""


def shard_name(rank: int, world_size: int) -> str:
    """File of one rank."""
    return f"shard-{rank + 1:05d}-of-{world_size:05d}.safetensors"


@dataclass(frozen=True)
class _Place:
    """Where a saved part lies."""

    path: Path
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class SavedTensors:
    """A sharded checkpoint on disk, opened for reading.

    Raises:
        ValueError: it is incomplete or damaged; the message says where.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        state = _read_state(folder)
        self.numbers: dict[str, Any] = state["numbers"]
        self.tensors: dict[str, TensorInfo] = state["tensors"]
        """Form of each whole tensor, in the order of the save."""
        self._places: dict[str, dict[tuple[int, ...], _Place]] = {name: {} for name in self.tensors}
        self._open: dict[Path, Any] = {}
        for rank in range(state["world_size"]):
            self._index(folder / shard_name(rank, state["world_size"]))
        for name, info in self.tensors.items():
            held = sum(math.prod(place.shape) for place in self._places[name].values())
            if held != math.prod(info.shape):
                raise ValueError(
                    f"checkpoint {folder} is damaged: its shards hold {held} of the {math.prod(info.shape)} numbers "
                    f"of {name}; restore it from a copy, or use an earlier checkpoint"
                )

    @property
    def num_weights(self) -> int:
        """Numbers in all tensors."""
        return sum(math.prod(info.shape) for info in self.tensors.values())

    def read(self, name: str) -> Tensor:
        """One whole tensor, on the CPU.

        Raises:
            ValueError: there is none of this name.
        """
        if name not in self.tensors:
            raise ValueError(f"checkpoint {self.folder} has no tensor {name!r}")
        info = self.tensors[name]
        places = list(self._places[name].values())
        if len(places) == 1 and places[0].shape == info.shape:
            whole: Tensor = self._file(places[0].path).get_tensor(name)
            return whole
        tensor = torch.empty(info.shape, dtype=info.dtype)
        for place in places:
            box = tuple(slice(at, at + size) for at, size in zip(place.offsets, place.shape, strict=True))
            tensor[box] = self._file(place.path).get_tensor(name)
        return tensor

    def part(self, index: MetadataIndex, box: tuple[slice, ...]) -> Tensor:
        """A box of one saved part, in the coordinates of that part."""
        place = self._places[index.fqn][tuple(index.offset or ())]
        file = self._file(place.path)
        if all(one.start == 0 and one.stop == size for one, size in zip(box, place.shape, strict=True)):
            whole: Tensor = file.get_tensor(index.fqn)
            return whole
        part: Tensor = file.get_slice(index.fqn)[box]
        return part

    def metadata(self, names: Collection[str]) -> Metadata:
        """What DCP's planner needs to know of these tensors."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=self.tensors[name].dtype),
                    torch.Size(self.tensors[name].shape),
                    [
                        ChunkStorageMetadata(torch.Size(place.offsets), torch.Size(place.shape))
                        for place in self._places[name].values()
                    ],
                )
                for name in names
            }
        )

    def _file(self, path: Path) -> Any:
        """The file, opened once; its pages are mapped, not read."""
        if path not in self._open:
            try:
                check_regular(path)
                self._open[path] = safe_open(path, framework="pt")
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
        return self._open[path]

    def _offsets(self, path: Path, text: str) -> dict[str, tuple[int, ...]]:
        """Where the parts in a file lie in their tensors."""
        try:
            given = parse_json(text)
            found = {name: entry["saved_offsets"] for name, entry in given.items()}
        except (ValueError, AttributeError, KeyError, TypeError):
            found = {"": None}
        if not all(map(_are_sizes, found.values())):
            raise ValueError(
                f"checkpoint {self.folder} is damaged: {path.name} does not say where its parts belong ({OFFSETS})"
            )
        return {name: tuple(offsets) for name, offsets in found.items()}

    def _index(self, path: Path) -> None:
        file = self._file(path)
        offsets = self._offsets(path, (file.metadata() or {}).get(OFFSETS, "{}"))
        for name in file.keys():  # noqa: SIM118  (not a dictionary)
            part = file.get_slice(name)
            place = _Place(path, offsets.get(name, ()), tuple(part.get_shape()))
            info = self.tensors.get(name)
            if info is None or not _fits(info, dtype_named(part.get_dtype()), place):
                raise ValueError(
                    f"checkpoint {self.folder} is damaged: {path.name} holds a part of {name} that {STATE_FILE} does "
                    f"not describe; files of two checkpoints were mixed"
                )
            self._places[name][place.offsets] = place


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < _MAX_SIZE for one in value)


def _fits(info: TensorInfo, dtype: torch.dtype, place: _Place) -> bool:
    inside = len(place.offsets) == len(place.shape) == len(info.shape) and all(
        at >= 0 and at + size <= whole
        for at, size, whole in zip(place.offsets, place.shape, info.shape, strict=True)
    )
    return inside and dtype == info.dtype


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
    return {**state, "tensors": {name: _info(folder, name, entry) for name, entry in tensors.items()}}


def _info(folder: Path, name: str, entry: Any) -> TensorInfo:
    """The form of a tensor in the state file."""
    form = entry if isinstance(entry, dict) else {}
    if not isinstance(form.get("dtype"), str) or not _are_sizes(form.get("shape")):
        raise ValueError(f"checkpoint {folder} is damaged: {STATE_FILE} gives {name} no type and shape")
    return TensorInfo(dtype_named(form["dtype"]), tuple(form["shape"]))
