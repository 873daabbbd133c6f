"""Positions of the elements that differ between two arrays, as fast as they can be read.

A function in C (comparison.c), compiled once for a machine; where that fails, numpy finds the same.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from strop.utils.c_library import c_library

SOURCE = Path(__file__).with_name("comparison.c")
FLAGS = ("-O3", "-march=native", "-fno-strict-aliasing", "-fopenmp", "-fPIC")
LINE_BYTES = 64
"""Bytes that the compiled function looks at together."""
_SAMPLE = 4096
"""Elements that are looked at first: where most of them differ, the others are not compared."""
_PART = 1 << 16
"""Elements that are worth a thread, and that numpy compares at a time, so that they stay in the cache."""

Bits = NDArray[Any]


def differing(old: Bits, new: Bits, limit: int) -> Bits | None:
    """Positions [n] int64, ascending, of the elements that differ; None where it sees that they are more than `limit`.

    Args:
        old, new: [count] integers of 1, 2, 4 or 8 bytes, contiguous.
        limit: number up to which the positions are wanted.
    """
    step = max(1, len(new) // _SAMPLE)
    if np.count_nonzero(old[::step] != new[::step]) * step > limit:
        return None
    kernel = comparison_kernel()
    positions = _by_numpy(old, new) if kernel is None else kernel.differing(old, new, limit)
    return None if positions is None or len(positions) > limit else positions


class ComparisonKernel:
    """The compiled function."""

    def __init__(self, library: Path) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._differing = ctypes.CDLL(str(library)).differing
        self._differing.argtypes = [
            pointer, pointer, number, ctypes.c_int, number, number, pointer, pointer, ctypes.c_int
        ]  # fmt: skip
        self._differing.restype = None

    def differing(self, old: Bits, new: Bits, limit: int) -> Bits | None:
        """As the function above, without a look at a sample."""
        threads = max(1, min(torch.get_num_threads(), len(new) // _PART))
        part = -(-len(new) // (threads * LINE_BYTES)) * LINE_BYTES
        num_parts = -(-len(new) // part) if part else 0
        most = min(part, limit) + LINE_BYTES
        out = np.empty((num_parts, most), dtype=np.int64)  # memory is taken where something is written
        counts = np.empty(num_parts, dtype=np.int64)
        self._differing(
            old.ctypes.data, new.ctypes.data, len(new), new.itemsize, part, most, out.ctypes.data,
            counts.ctypes.data, threads,
        )  # fmt: skip
        if (counts < 0).any():
            return None
        found = [positions[:count] for positions, count in zip(out, counts.tolist(), strict=True)]
        return np.concatenate([np.empty(0, dtype=np.int64), *found])


def _by_numpy(old: Bits, new: Bits) -> Bits:
    starts = range(0, len(new), _PART)
    parts = (
        np.flatnonzero(old[start : start + _PART] != new[start : start + _PART]) + start for start in starts
    )
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


@cache
def comparison_kernel() -> ComparisonKernel | None:
    """None where nothing can be compiled."""
    library = c_library(SOURCE, flags=FLAGS, doing="the comparison of weights with those sent last")
    return None if library is None else ComparisonKernel(library)
