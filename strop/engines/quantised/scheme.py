"""The form of quantised weights, from the `quantization_config` of a config.json.

Read are `mxfp4` (experts of gpt-oss), `fp8` (DeepSeek V3 and R1, Qwen3-FP8 and others) and those forms of
compressed-tensors in which a weight is an FP8 number or an integer times its scale, without zero points.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

_ENTRIES = ("quantization_config", "compression_config")
"""The second name is that of the first versions of compressed-tensors."""
_FP8, _INT8 = ("F8_E4M3", "F8_E5M2"), ("I8",)
_FORMATS = {
    "float-quantized": ("float", 8),
    "int-quantized": ("int", 8),
    "naive-quantized": (None, 8),
    "pack-quantized": ("int", None),
}
"""Formats of compressed-tensors -> type of numbers, and their bits; None: as the group says."""
_PACKED = {4: "INT4", 8: "packed INT8"}
"""Bits that are read; others lie across words."""
READABLE = (
    "MXFP4 of gpt-oss, FP8 with weight_scale_inv, and symmetric FP8, INT8 and INT4 of compressed-tensors"
)
"""For people."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The form of a folder's quantised weights."""

    form: Literal["mxfp4", "scaled"]
    types: tuple[str, ...] = ()
    """Types of weights that have a scale beside them, by the names of safetensors."""
    packed_bits: int = 0
    """Bits of the integers that are packed into words of 32; 0: none are."""
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
        block = settings.get("weight_block_size") or ()
        return _scheme({"FP8"}, {tuple(block)} if block else set()) if not block or _is_block(block) else None
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
    if scheme is not None and scheme.form == "scaled":
        config.dtype = torch.float32  # products with scales do not fit in less


def without_entries(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a config.json without what it says of quantised weights, itself or for a model in it."""
    kept = {name: value for name, value in settings.items() if name not in _ENTRIES}
    return {
        name: without_entries(value) if isinstance(value, Mapping) else value for name, value in kept.items()
    }


def _of_compressed_tensors(settings: Mapping[str, Any]) -> Scheme | None:
    """None where a group is in another form; rotations of weights (transform_config) and sparse ones are not read."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or settings.get("transform_config") or _is_sparse(settings):
        return None
    kinds: set[str] = set()
    blocks: set[tuple[int, int]] = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            return None
        kind = _kind(weights, group.get("format") or settings.get("format"))
        block = _block(weights)
        if not kind or block is None:
            return None
        kinds.add(kind)
        blocks |= {block} if block else set()
    return _scheme(kinds, blocks) if kinds and not kinds.issuperset(_PACKED.values()) else None


def _kind(weights: Mapping[str, Any], form: object) -> str:
    """The numbers of a group of compressed-tensors; empty where they are in a form that is not read."""
    number, bits = weights.get("type", "int"), weights.get("num_bits")
    if not (isinstance(form, str) and isinstance(number, str) and form in _FORMATS):
        return ""
    if not weights.get("symmetric", True) or weights.get("actorder") == "group":
        return ""
    of_form, bits_of_form = _FORMATS[form]
    if number != (of_form or number) or bits != (bits_of_form or bits):
        return ""
    if form == "pack-quantized":
        return next((name for size, name in _PACKED.items() if size == bits), "")
    return {"float": "FP8", "int": "INT8"}.get(number, "")


def _block(weights: Mapping[str, Any]) -> tuple[int, int] | tuple[()] | None:
    """Rows and columns that share a scale; () for a row or a whole matrix; None for another strategy."""
    strategy, size = weights.get("strategy"), weights.get("group_size")
    if strategy in ("tensor", "channel"):
        return ()
    if strategy == "group" and type(size) is int and size > 0:
        return 1, size
    block: Any = weights.get("block_structure")
    return (block[0], block[1]) if strategy == "block" and _is_block(block) else None


def _is_sparse(settings: Mapping[str, Any]) -> bool:
    sparsity = settings.get("sparsity_config")
    return isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense"


def _is_block(value: Any) -> bool:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return is_pair and all(type(size) is int and size > 0 for size in value)


def _scheme(kinds: set[str], blocks: set[Any]) -> Scheme:
    sizes = tuple(sorted(blocks))
    written = " and ".join(f"{rows} x {columns}" for rows, columns in sizes)
    return Scheme(
        form="scaled",
        types=(_FP8 if "FP8" in kinds else ()) + (_INT8 if "INT8" in kinds else ()),
        packed_bits=4 if "INT4" in kinds else 8 if "packed INT8" in kinds else 0,
        blocks=sizes,
        name=" and ".join(sorted(kinds)) + (f" in blocks of {written}" if sizes else ""),
    )
