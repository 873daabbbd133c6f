"""Folders with quantised weights, written and read number by number, from the specifications of the formats."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""Magnitudes of four bits; bit 3 is the sign."""


def e4m3(byte: int) -> float:
    """Number of a byte: a sign, four bits of exponent (bias 7), three of mantissa; no infinity, one NaN per sign."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


_E4M3 = {byte: e4m3(byte) for byte in range(256)}


def to_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A matrix [rows, columns] divided by its scales and rounded to E4M3, and the numbers that this stands for.

    Args:
        weight: float32.
        scale: one for each block, in row-major order of blocks; of any type.
        block: rows and columns that share one.
    """
    rows, columns = weight.shape
    factors = np.array(
        [[scale[r // block[0], c // block[1]].float().item() for c in range(columns)] for r in range(rows)],
        dtype=np.float32,
    )
    stored = (weight / torch.from_numpy(factors)).to(torch.float8_e4m3fn)
    codes = [[_E4M3[byte] for byte in row] for row in stored.view(torch.uint8).tolist()]
    return stored, torch.from_numpy(np.array(codes, dtype=np.float32) * factors)


def block_scales(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude in each block over 448, the largest of E4M3."""
    rows, columns = (math.ceil(size / of) for size, of in zip(weight.shape, block, strict=True))
    scale = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = weight[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
            scale[row, column] = part.abs().max() / 448
    return scale


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Experts [experts, inputs, outputs] as gpt-oss has them, in blocks and exponents, and their numbers."""
    experts, inputs, outputs = weight.shape
    blocks = np.zeros((experts, outputs, inputs // 32, 16), dtype=np.uint8)
    exponents = np.zeros((experts, outputs, inputs // 32), dtype=np.uint8)
    numbers = np.zeros((experts, inputs, outputs), dtype=np.float32)
    for expert, output, group in np.ndindex(*exponents.shape):
        part = weight[expert, group * 32 : (group + 1) * 32, output].tolist()
        power = math.floor(math.log2(max(map(abs, part)))) - 2
        exponents[expert, output, group] = power + 127
        for place, value in enumerate(part):
            code = min(range(8), key=lambda code: abs(E2M1[code] - abs(value) / 2.0**power))
            magnitude = E2M1[code] * 2.0**power
            blocks[expert, output, group, place // 2] |= (code + 8 * (value < 0)) << 4 * (place % 2)
            numbers[expert, group * 32 + place, output] = -magnitude if value < 0 else magnitude
    return torch.from_numpy(blocks), torch.from_numpy(exponents), torch.from_numpy(numbers)


def write_fp8(
    plain: Path,
    folder: Path,
    *,
    block: tuple[int, int],
    of_scale: Callable[[Tensor], Tensor] = lambda scale: scale,
    end: str = "_scale_inv",
    settings: dict[str, Any] | None = None,
) -> Path:
    """A folder with its projections in FP8, and one beside it, `NAME-numbers`, with the numbers that they stand for.

    Args:
        plain: folder with one file of weights.
        folder: to write.
        block: rows and columns that share a scale; 0: all of the matrix.
        of_scale: makes the scales that are stored from exact ones.
        end: of the names of scales.
        settings: quantization_config; None: that of DeepSeek V3 and those after it.
    """
    tensors, numbers = load_file(plain / "model.safetensors"), load_file(plain / "model.safetensors")
    for name, weight in list(tensors.items()):
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            own = (block[0] or weight.shape[0], block[1] or weight.shape[1])
            scale = of_scale(block_scales(weight, own))
            tensors[name], numbers[name] = to_fp8(weight, scale, own)
            tensors[name + end] = scale
    method = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
    }
    return _write(plain, folder, tensors, numbers, method if settings is None else settings)


def to_integers(weight: Tensor, group: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """A matrix in integers of so many bits, a scale in bfloat16 for each run of `group` columns of a row, and their
    numbers."""
    rows, columns = weight.shape
    most = 2 ** (bits - 1) - 1
    integers = torch.zeros(rows, columns, dtype=torch.int8)
    scales = torch.zeros(rows, columns // group, dtype=torch.bfloat16)
    numbers = np.zeros((rows, columns), dtype=np.float32)
    for row, run in np.ndindex(rows, columns // group):
        part = weight[row, run * group : (run + 1) * group]
        scales[row, run] = part.abs().max() / most
        scale = np.float32(scales[row, run].float().item())
        codes = [max(-most - 1, min(most, round(value / float(scale)))) for value in part.tolist()]
        integers[row, run * group : (run + 1) * group] = torch.tensor(codes)
        numbers[row, run * group : (run + 1) * group] = np.array(codes, dtype=np.float32) * scale
    return integers, scales, torch.from_numpy(numbers)


def packed(integers: Tensor, bits: int) -> Tensor:
    """Words of 32 bits: each integer plus half of the range, the first of a word in its lowest bits."""
    words = []
    for row in integers.tolist():
        words.append([])
        for start in range(0, len(row), 32 // bits):
            codes = [value + 2 ** (bits - 1) for value in row[start : start + 32 // bits]]
            word = sum(code << bits * place for place, code in enumerate(codes))
            words[-1].append(word - 2**32 if word >= 2**31 else word)
    return torch.tensor(words, dtype=torch.int32)


def write_integers(plain: Path, folder: Path, *, group: int, bits: int, is_packed: bool) -> Path:
    """The same in integers of compressed-tensors; a group of 0 is the row."""
    tensors, numbers = load_file(plain / "model.safetensors"), load_file(plain / "model.safetensors")
    for name, weight in list(tensors.items()):
        if name.endswith("_proj.weight"):
            integers, scale, numbers[name] = to_integers(weight, group or weight.shape[1], bits)
            del tensors[name]
            tensors[f"{name}_scale"] = scale
            if is_packed:
                tensors[f"{name}_packed"] = packed(integers, bits)
                tensors[f"{name}_shape"] = torch.tensor(weight.shape)
            else:
                tensors[name] = integers
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    if not group:
        weights |= {"strategy": "channel", "group_size": None}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if is_packed else "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    return _write(plain, folder, tensors, numbers, settings)


def write_mxfp4(plain: Path, folder: Path) -> Path:
    """The same of gpt-oss, whose experts are in MXFP4 and other weights in bfloat16."""
    tensors, numbers = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"], numbers[name] = to_mxfp4(weight)
        else:
            tensors[name] = weight.bfloat16()
            numbers[name] = tensors[name].float()
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return _write(plain, folder, tensors, numbers, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


def numbers_of(folder: Path) -> Path:
    """Folder with the numbers of a quantised one."""
    return folder.with_name(f"{folder.name}-numbers")


def _write(
    plain: Path,
    folder: Path,
    tensors: dict[str, Tensor],
    numbers: dict[str, Tensor],
    settings: dict[str, Any],
) -> Path:
    for path, weights in ((folder, tensors), (numbers_of(folder), numbers)):
        shutil.copytree(plain, path)
        save_file({name: part.contiguous() for name, part in weights.items()}, path / "model.safetensors",
                  metadata={"format": "pt"})  # fmt: skip
    config = json.loads((plain / "config.json").read_text())
    config |= {"quantization_config": settings, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
