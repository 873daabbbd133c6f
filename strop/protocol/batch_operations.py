"""Operations of verl on batches that nothing in strop needs: mini-batches, and rows cut out of wide columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from strop.protocol.columns import BatchError, from_flat, is_jagged, parts
from strop.protocol.data_proto import DataProto
from strop.protocol.merging import chosen
from strop.utils.rng import permutation, random_key


def mini_batches(
    data: DataProto, mini_batch_size: int, epochs: int, seed: int | None, options: Mapping[str, Any]
) -> Iterator[DataProto]:
    """As `DataProto.make_iterator`."""
    order = _mini_batch_rows(len(data), mini_batch_size, epochs, seed, options)
    return (data.select_idxs(numbers) for numbers in order)


def unfolded(data: DataProto, n_split: int, split_keys: Sequence[str]) -> DataProto:
    """As `DataProto.unfold_column_chunks`."""
    repeated = data.repeat(n_split)
    tensors, others = repeated.tensors(), dict(repeated.non_tensor_batch)
    for columns, cut in ((data.tensors(), tensors), (data.non_tensor_batch, others)):
        cut |= {name: _unfolded(columns[name], n_split, name) for name in split_keys if name in columns}
    chosen({**tensors, **others}, split_keys, "batch or non_tensor_batch")
    batch = None if data.batch is None else TensorDict(tensors, batch_size=[len(data) * n_split])
    return DataProto(batch, others, data.meta_info)


def _mini_batch_rows(
    length: int, mini_batch_size: int, epochs: int, seed: int | None, options: Mapping[str, Any]
) -> Iterator[NDArray[np.int64]]:
    """Row numbers of each mini-batch; arguments as of `mini_batches`."""
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


def _unfolded(column: Any, n: int, name: str) -> Any:
    """A tensor column or array `[B, W, ...]` as `[B * n, W / n, ...]`; of a jagged column, each row of its own length.

    Raises:
        BatchError: n does not divide the width of a row; the message has `name`.
    """
    if isinstance(column, Tensor) and is_jagged(column):
        values, offsets = parts(column)
        lengths = offsets.diff()
        _check_width(int((lengths % n).max()) if len(lengths) else 0, n, name)
        return from_flat(values, (lengths // n).repeat_interleave(n))
    if column.ndim < 2:
        raise BatchError(f"column {name!r} holds one value per row and cannot be cut into {n} rows")
    _check_width(column.shape[1] % n, n, name)
    return column.reshape(len(column) * n, column.shape[1] // n, *column.shape[2:])


def _check_width(rest: int, n: int, name: str) -> None:
    if rest:
        raise BatchError(f"column {name!r} has a row whose width {n} does not divide (rest {rest})")
