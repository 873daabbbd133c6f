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
from strop.engines.quantised.numbers import block_of_scales, fp8_numbers, mxfp4_numbers
from strop.engines.quantised.scheme import Scheme

logger = logging.getLogger(__name__)

_FP8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("F32", "BF16", "F16", "F8_E8M0")
_SCALE_ENDS = ("_scale_inv", "_scale")
"""Behind the name of an FP8 weight: of DeepSeek and those after it, and of compressed-tensors. Both are factors."""
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
    stored = _stored(folder)
    quantised = _quantised(stored, scheme, torch.float32, folder)
    plain = _plain(stored, quantised)
    return {name: stored[name].dtype for name in plain} | {name: one.dtype for name, one in quantised.items()}


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
    stored = _stored(folder)
    quantised = _quantised(stored, scheme, dtype, folder)
    with contextlib.ExitStack() as stack:
        slices: dict[str, Any] = {}
        for path in weight_paths(folder):
            file = stack.enter_context(safe_open(path, framework="pt"))
            slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a dictionary)
        weights = {name: slices[name] for name in _plain(stored, quantised)}
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


def _stored(folder: str | Path) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for path in weight_paths(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dictionary)
                part = file.get_slice(name)
                stored[name] = _Stored(dtype=part.get_dtype(), shape=tuple(part.get_shape()))
    return stored


def _plain(stored: Mapping[str, _Stored], quantised: Mapping[str, _Quantised]) -> list[str]:
    """Names of tensors that are no part of a quantised weight."""
    parts = {name for one in quantised.values() for name in (one.weight, one.scale)}
    return [name for name in stored if name not in parts]


def _quantised(
    stored: Mapping[str, _Stored], scheme: Scheme, dtype: torch.dtype, folder: str | Path
) -> dict[str, _Quantised]:
    """Quantised weights by their names in an unquantised folder."""
    if scheme.form == "mxfp4":
        return _mxfp4(stored, dtype, folder)
    weights = {}
    for name, tensor in stored.items():
        if tensor.dtype in _FP8:
            weights[name] = _fp8(name, stored, scheme, folder)
    return weights


def _fp8(name: str, stored: Mapping[str, _Stored], scheme: Scheme, folder: str | Path) -> _Quantised:
    scale = next((name + end for end in _SCALE_ENDS if name + end in stored), None)
    if scale is None:
        raise ValueError(
            f"model folder {str(folder)!r} has {name} in FP8 ({stored[name].dtype}) and no scale for it "
            f"({name}{_SCALE_ENDS[0]} or {name}{_SCALE_ENDS[1]}): its files are not complete, or in a form that is not "
            f"read; give a folder of the same model in bfloat16 or float32"
        )
    shape, of_scale = stored[name].shape, stored[scale].shape
    block = block_of_scales(shape, of_scale, scheme.blocks)
    if block is None or stored[scale].dtype not in _SCALES:
        raise ValueError(
            f"model folder {str(folder)!r} has {scale} with shape {list(of_scale)} of {stored[scale].dtype} for "
            f"{name} with shape {list(shape)}, and its config.json says {scheme.name}: that is no form that is read; "
            f"give a folder of the same model in bfloat16 or float32"
        )
    numbers = functools.partial(fp8_numbers, block=block)
    return _Quantised(weight=name, scale=scale, dtype="F32", numbers=numbers)


def _mxfp4(stored: Mapping[str, _Stored], dtype: torch.dtype, folder: str | Path) -> dict[str, _Quantised]:
    weights = {}
    for blocks in [name for name in stored if name.endswith(_BLOCKS)]:
        name = blocks.removesuffix(_BLOCKS)
        scales = name + _EXPONENTS
        shape = stored[blocks].shape
        of_scales = stored[scales].shape if scales in stored else None
        if len(shape) != 4 or of_scales != shape[:-1]:
            raise ValueError(
                f"model folder {str(folder)!r} has {blocks} with shape {list(shape)} and {scales} "
                f"{'missing' if of_scales is None else f'with shape {list(of_scales)}'}, but MXFP4 weights of gpt-oss "
                f"are [experts, outputs, groups, 16] with a scale for each group: its files are not complete; fetch "
                f"the folder again"
            )
        numbers = functools.partial(mxfp4_numbers, dtype=dtype)
        weights[name] = _Quantised(weight=blocks, scale=scales, dtype="BF16", numbers=numbers)
    return weights
