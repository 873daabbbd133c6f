"""The floating-point operations per second that a device can do at best: products of matrices, dense."""

from __future__ import annotations

import re
import time
from functools import lru_cache

import torch

_HALF = {
    "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200 NVL": 835e12, "H200": 989e12, "H800": 989e12,
    "GH200": 989e12, "H20": 148e12, "B200": 2250e12, "GB200": 2500e12, "A100": 312e12, "A800": 312e12,
    "A40": 149.7e12, "A30": 165e12, "A10": 125e12, "L40S": 362e12, "L40": 181e12, "L20": 119.5e12, "L4": 121e12,
    "RTX 6000 Ada": 364e12, "RTX A6000": 154.8e12, "RTX 4090": 165.2e12, "RTX 3090": 71e12, "MI300X": 1307e12,
    "MI250X": 383e12,
}  # fmt: skip
"""In bfloat16 and float16 without sparsity, accumulated in float32, by words of the device's name; of the makers' data
sheets. The longest name that fits counts."""
_OTHERS = re.compile(r"\b(laptop|max-q|4090 d|3090 ti|mig)\b", re.IGNORECASE)
"""Slower or faster kin of a device, under its name and a word more."""
_ROUGH_SIZE, _SIZE, _REPEATS = 128, 512, 5


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations per second at best; None where it is not known.

    Of accelerators in half precision as their makers say. Of a CPU as a short measurement says, with the threads that
    tensor operations use now.
    """
    if device.type == "cpu":
        return _measured(dtype, torch.get_num_threads())
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return half_precision_peak(str(getattr(torch, device.type).get_device_name(device)))


def half_precision_peak(name: str) -> float | None:
    """Of a device by the name that its driver gives it, `NVIDIA H200` and the like."""
    if _OTHERS.search(name):
        return None
    matches = [words for words in _HALF if re.search(rf"\b{words}\b", name, re.IGNORECASE)]
    return _HALF[max(matches, key=len)] if matches else None


def bfloat16_speedup() -> float:
    """Speed of a bfloat16 matrix product over that of a float32 one on this CPU; measured once.

    About 50 ms. Processors without instructions for bfloat16 need a quarter of a second for one product of the larger
    size, so small ones are tried first, which tell these.
    """
    speedup = 0.0
    for size in (_ROUGH_SIZE, _SIZE):
        half, single = (
            _measured(dtype, torch.get_num_threads(), size) for dtype in (torch.bfloat16, torch.float32)
        )
        speedup = half / single
        if speedup < 0.5:
            break
    return speedup


@lru_cache
def _measured(dtype: torch.dtype, num_threads: int, size: int = _SIZE) -> float:
    """The fastest of a few products of matrices; about 20 ms. Another program on the machine only makes some of them
    longer."""
    a = torch.ones(size, size, dtype=dtype)
    a @ a
    seconds = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


_WORTH_SAYING = 1.2
"""By how much products must be faster in another precision for a person to hear of it; below, it may be noise."""


def precision_hint(dtype: torch.dtype) -> str:
    """That the other precision is faster on this CPU, for a line that ends with the one in force; else nothing."""
    if dtype == torch.float64:
        return ""
    speedup = bfloat16_speedup()
    if dtype == torch.bfloat16:
        if speedup > 1 / _WORTH_SAYING:
            return ""
        return (
            f"; products of float32 run {1 / speedup:.1f} times as fast here (model.dtype=float32 uses them)"
        )
    if speedup < _WORTH_SAYING:
        return ""
    use = "model.dtype=bfloat16 uses them, at lower precision"
    return f"; products of bfloat16 run {speedup:.1f} times as fast here ({use})"
