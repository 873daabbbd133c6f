"""The numbers that quantised weights stand for.

Products are taken in float32, in which what is stored, each scale and each MXFP4 number is exact. MXFP4 numbers fit in
bfloat16.

Source: OCP Microscaling Formats (MX) Specification 1.0 (E2M1, E8M0); DeepSeek-V3, arXiv:2412.19437, section 3.3
(a scale for each block of 128 x 128 weights, by which what is stored is multiplied).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Number of each code of four bits: a sign, two bits of exponent, one of mantissa."""


def block_of_scales(
    weight: tuple[int, ...], scale: tuple[int, ...], blocks: tuple[tuple[int, int], ...]
) -> tuple[int, int] | None:
    """Rows and columns that share a scale; None where the scales do not belong to such a weight.

    One scale is of the whole matrix, one per row of that row; else they are of blocks, of which the last ones of a
    row or column may be cut off by its end.

    Args:
        weight: shape [..., rows, columns].
        scale: shape of its scales: of one number, or with as many dimensions.
        blocks: that the folder declares.
    """
    if len(weight) < 2:
        return None
    rows, columns = weight[-2:]
    if math.prod(scale) == 1:
        return rows, columns
    if len(scale) != len(weight) or scale[:-2] != weight[:-2]:
        return None
    if scale[-1] == 1 and scale[-2] in (1, rows):
        return rows // scale[-2], columns
    grids = {block: (-(-rows // block[0]), -(-columns // block[1])) for block in blocks}
    found = next((block for block, grid in grids.items() if grid == scale[-2:]), None)
    return None if found is None else (min(found[0], rows), min(found[1], columns))


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Integers [..., columns] that lie in int32 words [..., columns * bits / 32], the first in the lowest bits, each
    with half of its range added."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return (codes - (1 << (bits - 1))).to(torch.int8).flatten(-2)


def scaled_numbers(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Numbers of a weight that is stored as smaller ones beside their scales.

    Args:
        weight: [..., rows, columns] float8 or int8.
        scale: [..., ceil(rows / block[0]), ceil(columns / block[1])] of any floating-point type, or one number.
        block: as of `block_of_scales`.

    Returns:
        [..., rows, columns] float32.
    """
    rows, columns = weight.shape[-2:]
    numbers = weight.to(torch.float32)
    wide = scale.to(torch.float32)
    if wide.numel() == 1:
        return numbers.mul_(wide.reshape(()))
    of_rows = wide.repeat_interleave(block[0], dim=-2)[..., :rows, :]
    for place, start in enumerate(range(0, columns, block[1])):  # never scales of the size of the weight
        numbers[..., start : start + block[1]] *= of_rows[..., place, None]
    return numbers


def mxfp4_numbers(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of stacked experts in four bits, as the layers of gpt-oss have them: inputs are rows.

    Args:
        blocks: [experts, outputs, groups, 16] uint8: two numbers in each byte, the first in its lower half.
        scales: [experts, outputs, groups] uint8: exponents of 2 plus 127; 255 is no number.
        dtype: of what is returned; bfloat16 holds the numbers exactly.

    Returns:
        [experts, groups * 32, outputs].
    """
    experts, outputs, groups, size = blocks.shape
    made = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    codes = torch.arange(256)
    pairs = torch.tensor(_E2M1, dtype=made)[torch.stack((codes & 15, codes >> 4), dim=1)]  # [256, 2]
    words = pairs.view(torch.int32 if made == torch.bfloat16 else torch.int64)[
        :, 0
    ]  # three times as fast to look up
    numbers = torch.empty(experts, groups * size * 2, outputs, dtype=dtype)
    for expert in range(experts):  # one at a time: indices are four times as large as the file
        powers = scales[expert].view(torch.float8_e8m0fnu).to(made)  # [outputs, groups]
        unscaled = words.index_select(0, blocks[expert].flatten().int()).view(made).view(outputs, groups, -1)
        numbers[expert] = unscaled.mul_(powers[..., None]).view(outputs, -1).T
    return numbers
