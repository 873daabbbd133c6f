"""How long work of a device takes, and the memory that it needs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu.look import Look

GIB = 1 << 30


def seconds(look: Look, work: Callable[[], Any], *, warm: int = 1, repeats: int = 1) -> float:
    """Median of the tries after the warm-up, the device waited for."""
    for _ in range(warm):
        work()
    taken = []
    for _ in range(repeats):
        look.sync()
        begin = time.perf_counter()
        work()
        look.sync()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def micros(look: Look, work: Callable[[], Any], *, count: int = 50) -> float:
    """Microseconds of short work, many times in a row."""
    repeats = look.size(count, 3)

    def many() -> None:
        for _ in range(repeats):
            work()

    return round(1e6 * seconds(look, many) / repeats, 2)


def peak_gib(look: Look) -> dict[str, float]:
    """Most memory of the device since the measurement began; nothing on a CPU."""
    if look.device != "cuda":
        return {}
    return {
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / GIB, 3),
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / GIB, 3),
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Some of their quantiles, and the largest."""
    ordered = sorted(values)
    shares = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
    at = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in shares.items()}
    return {name: round(value, 3) for name, value in (at | {"max": ordered[-1]}).items()}
