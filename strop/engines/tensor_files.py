"""Safetensors files written tensor by tensor.

`safetensors.torch.save_file` keeps a copy of all tensors as bytes and holds the interpreter lock while it
writes. Here one tensor is in hand at a time, and the lock is free while the kernel copies: a checkpoint can be
written beside a training step, and a model exported that does not fit twice into memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from strop.base.durable import sync_folder, write_durable

_DTYPE_NAMES = {
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
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_WRITE_BYTES = (
    1 << 26
)  # handed to the kernel at a time, so that an interrupt need not wait for a whole tensor
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorInfo:
    """Form of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def info_of(tensor: Tensor) -> TensorInfo:
    """Form of a tensor; of a DTensor, that of the whole."""
    return TensorInfo(tensor.dtype, tuple(tensor.shape))


def dtype_name(dtype: torch.dtype) -> str:
    """The word of the safetensors format for a type.

    Raises:
        ValueError: the format has none.
    """
    if dtype not in _DTYPE_NAMES:
        known = ", ".join(str(one).removeprefix("torch.") for one in _DTYPE_NAMES)
        raise ValueError(f"tensors of type {dtype} cannot be saved; convert to one of {known}")
    return _DTYPE_NAMES[dtype]


def dtype_named(name: str) -> torch.dtype:
    """The type that `dtype_name` gave this word.

    Raises:
        ValueError: an unknown word.
    """
    if name not in _DTYPES:
        raise ValueError(f"unknown type {name!r} of a saved tensor; known: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def aligned_order(layout: Mapping[str, TensorInfo]) -> list[str]:
    """Names in an order that leaves every tensor of a file aligned to its element size: large elements first."""
    return sorted(layout, key=lambda name: -layout[name].dtype.itemsize)


def write_tensors(
    path: Path, layout: Mapping[str, TensorInfo], tensors: Iterable[Tensor], *, metadata: Mapping[str, str]
) -> None:
    """Write a new safetensors file and wait for the disk.

    Args:
        path: the file.
        layout: form of each tensor, in the order in which they come (see `aligned_order`).
        tensors: taken one by one, on any device; none is kept.
        metadata: texts for the file's header.

    Raises:
        ValueError: a tensor that differs from its layout, or more or fewer of them; or a layout with unaligned ones.
        OSError: the disk refused.
    """
    if list(layout) != aligned_order(layout):
        raise ValueError(
            "tensors with larger elements come first, so that each is aligned; use aligned_order"
        )
    with path.open("wb") as file:
        file.write(_header(layout, metadata))
        for (name, info), tensor in zip(layout.items(), tensors, strict=True):
            if info_of(tensor) != info:
                raise ValueError(f"{name} was announced as {info}, but is {info_of(tensor)}")
            view = _bytes_of(tensor)
            for start in range(0, len(view), _WRITE_BYTES):
                file.write(view[start : start + _WRITE_BYTES])
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a new JSON file and wait for the disk.

    Raises:
        ValueError: a number that JSON cannot hold (NaN, infinity).
        TypeError: a value that JSON cannot hold.
        OSError: the disk refused.
    """
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    write_durable(path, text)
    sync_folder(path.parent)


def _header(layout: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, info in layout.items():
        end = at + info.num_bytes
        entries[name] = {
            "dtype": dtype_name(info.dtype),
            "shape": list(info.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    """The elements in row order, without a copy where the tensor lies in host memory like that."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
