"""Row numbers: of masks, of equal ranges, and of mini-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from strop.protocol.columns import BatchError
from strop.utils.rng import permutation, random_key

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


def mini_batch_rows(
    length: int, mini_batch_size: int, epochs: int, seed: int | None, options: Mapping[str, Any]
) -> Iterator[NDArray[np.int64]]:
    """Row numbers of each mini-batch; arguments as of `DataProto.make_iterator`."""
    if mini_batch_size < 1 or epochs < 0:
        raise BatchError(
            f"mini-batches need a size of at least 1 and 0 or more epochs, got size {mini_batch_size} and "
            f"{epochs} epochs"
        )
    unknown = sorted(set(options) - {"shuffle"})
    if unknown:
        raise BatchError(f"make_iterator knows the option 'shuffle' only, got {', '.join(unknown)}")
    shuffle = bool(options.get("shuffle", False))
    if shuffle and seed is None:
        raise BatchError("shuffled mini-batches need a seed, so that a run can be repeated; pass seed=")
    return _mini_batches(length, mini_batch_size, epochs, seed if shuffle else None)


def _mini_batches(length: int, size: int, epochs: int, seed: int | None) -> Iterator[NDArray[np.int64]]:
    for epoch in range(epochs):
        order = np.arange(length, dtype=np.int64)
        if seed is not None:
            order = permutation(random_key(seed, "mini_batches", epoch), length)
        for start in range(0, length, size):
            yield order[start : start + size]
