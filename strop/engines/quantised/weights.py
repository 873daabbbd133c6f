"""The weights of a folder with quantised ones, by their names in an unquantised folder of the same model.

transformers takes them in place of its own reading. Each is made when it is asked for, so that no more than a few are
in memory twice.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from strop.engines.model_folder import weight_paths
from strop.engines.quantised.numbers import block_of_scales, mxfp4_numbers, scaled_numbers, unpacked
from strop.engines.quantised.scheme import Scheme

logger = logging.getLogger(__name__)

_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
_SCALE_ENDS = ("_scale_inv", "_scale")
"""Behind the name of a weight: of DeepSeek and those after it, and of compressed-tensors. Both are factors."""
_PACKED, _SHAPE = "_packed", "_shape"
"""Ends of the names of a weight whose integers are packed into words of 32 bits, and of its shape unpacked."""
_UNREAD = ("_zero_point", "_g_idx")
"""Ends of the names of what changes the numbers, and is not read."""
_BLOCKS, _EXPONENTS = "_blocks", "_scales"
"""Ends of the names of an MXFP4 weight."""


@dataclass(frozen=True, kw_only=True)
class _Quantised:
    """A quantised weight: two tensors of the files, and what makes numbers of them."""

    weight: str
    scale: str
    dtype: str
    """Smallest type that holds its numbers, by the name of safetensors."""
    numbers: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _Unread:
    """A quantised weight that nobody has asked for yet; `[...]` reads it, as it does with safetensors' own slices."""

    weight: Any
    scale: Any
    numbers: Callable[[Tensor, Tensor], Tensor]

    def __getitem__(self, index: Any) -> Tensor:
        return self.numbers(self.weight[...], self.scale[...])[index]


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """A tensor of the files."""

    dtype: str
    shape: tuple[int, ...]


def dequantised_types(folder: str | Path, scheme: Scheme) -> dict[str, str]:
    """Type that holds each weight of a folder, by its name in an unquantised one; for others as `stored_types`.

    Raises:
        ValueError: a quantised weight lacks its scale, or one of another shape lies beside it.
    """
    files = _Files(folder, scheme)
    quantised = files.quantised(torch.float32)
    types = {name: files.stored[name].dtype for name in files.plain(quantised)}
    return types | {name: one.dtype for name, one in quantised.items()}


@contextlib.contextmanager
def dequantised_weights(folder: str | Path, scheme: Scheme, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Weights of a folder by their names in an unquantised one, each read by `[...]`; the files are open inside.

    Args:
        folder: of the model.
        scheme: form of its quantised weights.
        dtype: that the model is to have: MXFP4 numbers are made in it, FP8 ones in float32.

    Raises:
        ValueError: as `dequantised_types`.
    """
    files = _Files(folder, scheme)
    quantised = files.quantised(dtype)
    with contextlib.ExitStack() as stack:
        slices: dict[str, Any] = {}
        for path in weight_paths(folder):
            file = stack.enter_context(safe_open(path, framework="pt"))
            slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a dictionary)
        weights = {name: slices[name] for name in files.plain(quantised)}
        for name, one in quantised.items():
            weights[name] = _Unread(slices[one.weight], slices[one.scale], one.numbers)
        if quantised:
            _say(str(folder), len(quantised), scheme.name, str(dtype).removeprefix("torch."))
        yield weights


@functools.lru_cache(maxsize=64)
def _say(folder: str, count: int, form: str, dtype: str) -> None:
    """Once per process: several roles may begin with one folder."""
    logger.warning(
        "%s: %d of its weights are quantised (%s): they are read as the numbers that they stand for, in %s, and saved "
        "so",
        folder,
        count,
        form,
        dtype,
    )


class _Files:
    """The headers of a folder's files."""

    def __init__(self, folder: str | Path, scheme: Scheme) -> None:
        self.stored: dict[str, _Stored] = {}
        self._scheme, self._folder = scheme, str(folder)
        self._columns: dict[str, int] = {}
        for path in weight_paths(folder):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a dictionary)
                    part = file.get_slice(name)
                    self.stored[name] = _Stored(dtype=part.get_dtype(), shape=tuple(part.get_shape()))
                    if scheme.packed_bits and name.endswith(_SHAPE):
                        self._columns[name.removesuffix(_SHAPE)] = int(part[...].flatten()[-1])

    def quantised(self, dtype: torch.dtype) -> dict[str, _Quantised]:
        """Quantised weights by their names in an unquantised folder; MXFP4 numbers are made in `dtype`."""
        weights = {}
        for name, tensor in self.stored.items():
            if self._scheme.form == "mxfp4" and name.endswith(_BLOCKS):
                weights[name.removesuffix(_BLOCKS)] = self._mxfp4(name, dtype)
            elif tensor.dtype in self._scheme.types:
                weights[name] = self._scaled(name, name, bits=0)
            elif self._scheme.packed_bits and name.endswith(_PACKED) and tensor.dtype == "I32":
                own = name.removesuffix(_PACKED)
                weights[own] = self._scaled(own, name, bits=self._scheme.packed_bits)
        return weights

    def plain(self, quantised: Mapping[str, _Quantised]) -> list[str]:
        """Names of tensors that are no part of a quantised weight."""
        parts = {name for one in quantised.values() for name in (one.weight, one.scale)}
        parts |= {name + _SHAPE for name in quantised}
        return [name for name in self.stored if name not in parts]

    def _scaled(self, name: str, stored_name: str, *, bits: int) -> _Quantised:
        """The weight `name`, which the files have as `stored_name`, of packed integers where they have `bits`."""
        weight = self.stored[stored_name]
        scale = next((name + end for end in _SCALE_ENDS if name + end in self.stored), None)
        if scale is None:
            raise self._refusal(
                f"{stored_name}, stored as {weight.dtype}, and no scale for it ({name}{_SCALE_ENDS[0]} or "
                f"{name}{_SCALE_ENDS[1]}): its files are not complete, or in a form that is not read"
            )
        shape = weight.shape
        if bits:  # the last word of a row may have room left
            room = weight.shape[-1] * 32 // bits
            columns = self._columns.get(name, room)
            if not 0 <= room - columns < 32 // bits:
                raise self._refusal(
                    f"{stored_name} with shape {list(shape)} for {columns} columns of {bits} bits"
                )
            shape = (*shape[:-1], columns)
        of_scale = self.stored[scale]
        block = block_of_scales(shape, of_scale.shape, self._scheme.blocks)
        if block is None or of_scale.dtype not in _SCALES:
            raise self._refusal(
                f"{scale} with shape {list(of_scale.shape)} of {of_scale.dtype} for {name} with shape {list(shape)}, "
                f"and its config.json says {self._scheme.name}: that is no form that is read"
            )
        for end in _UNREAD:
            if name + end in self.stored:
                raise self._refusal(f"{name}{end}: zero points and reordered columns are not read")
        numbers = functools.partial(_numbers, block=block, bits=bits, columns=shape[-1])
        return _Quantised(weight=stored_name, scale=scale, dtype="F32", numbers=numbers)

    def _mxfp4(self, blocks: str, dtype: torch.dtype) -> _Quantised:
        scales = blocks.removesuffix(_BLOCKS) + _EXPONENTS
        shape = self.stored[blocks].shape
        of_scales = self.stored[scales].shape if scales in self.stored else None
        if len(shape) != 4 or of_scales != shape[:-1]:
            raise self._refusal(
                f"{blocks} with shape {list(shape)} and {scales} "
                f"{'missing' if of_scales is None else f'with shape {list(of_scales)}'}, but MXFP4 weights of gpt-oss "
                f"are [experts, outputs, groups, 16] with a scale for each group: its files are not complete"
            )
        numbers = functools.partial(mxfp4_numbers, dtype=dtype)
        return _Quantised(weight=blocks, scale=scales, dtype="BF16", numbers=numbers)

    def _refusal(self, what: str) -> ValueError:
        return ValueError(
            f"model folder {self._folder!r} has {what}; fetch it again, or give a folder of the same model in bfloat16 "
            f"or float32"
        )


def _numbers(weight: Tensor, scale: Tensor, *, block: tuple[int, int], bits: int, columns: int) -> Tensor:
    return scaled_numbers(unpacked(weight, bits)[..., :columns] if bits else weight, scale, block)
