"""The form of quantised weights, from the `quantization_config` of a config.json.

Three forms are read: `mxfp4` (experts of gpt-oss), `fp8` (DeepSeek V3 and R1, Qwen3-FP8 and others) and the
`float-quantized` one of compressed-tensors. In each, a weight is what is stored times its scale, without zero points.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

_ENTRIES = ("quantization_config", "compression_config")
"""The second name is that of the first versions of compressed-tensors."""
_FLOAT_FORMATS = ("float-quantized", "naive-quantized")
"""Formats of compressed-tensors whose weights lie in the file as they are, beside their scales."""
READABLE = "MXFP4 of gpt-oss, FP8 with weight_scale_inv, and float-quantized of compressed-tensors"
"""For people."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The form of a folder's quantised weights."""

    form: Literal["mxfp4", "fp8"]
    blocks: tuple[tuple[int, int], ...] = ()
    """Rows and columns of the blocks that share a scale, as far as there are any."""
    name: str
    """For people: `FP8 in blocks of 128 x 128`."""


def declared(config: Any) -> Mapping[str, Any] | None:
    """The entry of a configuration, or of its language model's, that says that weights are quantised."""
    for part in (config, config.get_text_config()):
        for entry in _ENTRIES:
            settings = getattr(part, entry, None)
            if settings:
                return settings if isinstance(settings, Mapping) else {}
    return None


def scheme_of(config: Any) -> Scheme | None:
    """Form of the weights that a configuration belongs to; None where they are not quantised, or in no form that is
    read."""
    settings = declared(config)
    method = None if settings is None else settings.get("quant_method")
    if settings is None or not isinstance(method, str):
        return None
    if method == "mxfp4" and config.get_text_config().model_type == "gpt_oss":
        return Scheme(form="mxfp4", name="MXFP4")
    if method == "fp8":
        block = settings.get("weight_block_size")
        return None if block and not _is_block(block) else _fp8([block] if block else [])
    return _of_compressed_tensors(settings) if method == "compressed-tensors" else None


def method_name(settings: Mapping[str, Any]) -> str:
    """Method and format of a `quantization_config`, for a sentence; empty where it names none."""
    named = [settings.get("quant_method"), settings.get("format")]
    return " ".join(name for name in named if isinstance(name, str))


def forget(config: Any) -> None:
    """Let a configuration describe the dequantised weights: no entry says that they are quantised."""
    scheme = scheme_of(config)
    for part in (config, config.get_text_config()):
        for entry in _ENTRIES:
            with contextlib.suppress(AttributeError):
                delattr(part, entry)
    if scheme is not None and scheme.form == "fp8":
        config.dtype = torch.float32  # products of an FP8 number and its scale do not fit in less


def without_entries(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json without what it says of quantised weights, itself or for a model in it."""
    kept = {name: value for name, value in settings.items() if name not in _ENTRIES}
    return {
        name: without_entries(value) if isinstance(value, Mapping) else value for name, value in kept.items()
    }


def _of_compressed_tensors(settings: Mapping[str, Any]) -> Scheme | None:
    """All groups must be of one float format; rotations of weights (transform_config) and sparse ones are not read."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return None
    if settings.get("transform_config") or _is_sparse(settings.get("sparsity_config")):
        return None
    blocks = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if (
            not isinstance(weights, Mapping)
            or (group.get("format") or settings.get("format")) not in _FLOAT_FORMATS
        ):
            return None
        if (
            weights.get("type") != "float"
            or weights.get("num_bits") != 8
            or not weights.get("symmetric", True)
        ):
            return None
        if weights.get("strategy") == "block":
            if not _is_block(weights.get("block_structure")):
                return None
            blocks.append(weights["block_structure"])
        elif weights.get("strategy") not in ("tensor", "channel"):
            return None
    return _fp8(blocks)


def _is_sparse(settings: object) -> bool:
    return isinstance(settings, Mapping) and settings.get("format", "dense") != "dense"


def _is_block(value: object) -> bool:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return is_pair and all(type(size) is int and size > 0 for size in value)  # type: ignore[attr-defined]


def _fp8(blocks: list[Any]) -> Scheme:
    sizes = tuple(sorted({(int(rows), int(columns)) for rows, columns in blocks}))
    written = " and ".join(f"{rows} x {columns}" for rows, columns in sizes)
    return Scheme(form="fp8", blocks=sizes, name=f"FP8 in blocks of {written}" if sizes else "FP8")
