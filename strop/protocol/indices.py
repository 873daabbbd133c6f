"""Row selection: numbers, masks and equal ranges."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from strop.protocol.columns import BatchError

Rows = Sequence[int] | Sequence[bool] | NDArray[Any] | Tensor
"""Row numbers (negative ones count from the end), or one bool per row."""


def row_numbers(idxs: Rows, length: int) -> NDArray[np.int64]:
    """Row numbers 0 to length - 1 for a mask, or for numbers of which negative ones count from the end."""
    array = idxs.detach().cpu().numpy() if isinstance(idxs, Tensor) else np.asarray(idxs)
    if array.ndim != 1:
        raise BatchError(f"rows are chosen by one axis of numbers or bools, got shape {list(array.shape)}")
    if array.dtype == bool:
        if len(array) != length:
            raise BatchError(f"a row mask needs one bool per row: {length} rows, {len(array)} bools")
        return np.flatnonzero(array).astype(np.int64)
    if len(array) and array.dtype.kind not in "iu":
        raise BatchError(f"rows are chosen by integers or bools, got {array.dtype}")
    index = array.astype(np.int64)
    if len(index) and not (-length <= index.min() and index.max() < length):
        raise IndexError(f"rows {index.min()} to {index.max()} were asked of a batch that has {length} rows")
    return np.where(index < 0, index + length, index)


def balanced_ranges(length: int, chunks: int) -> list[tuple[int, int]]:
    """`chunks` ranges (start, stop) that cover `length` in order; sizes differ by at most one."""
    if chunks < 1:
        raise BatchError(f"a batch is cut into at least 1 chunk, got {chunks}")
    bounds = [length // chunks * number + min(number, length % chunks) for number in range(chunks + 1)]
    return list(pairwise(bounds))
