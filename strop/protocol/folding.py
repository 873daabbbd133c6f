"""Rows regrouped along a second axis, and rows added so that their number divides."""

from __future__ import annotations

from strop.protocol.columns import BatchError, is_jagged
from strop.protocol.data_proto import DataProto


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Columns `[B, ...]` as `[new_batch_size, B / new_batch_size, ...]`; dense columns only."""
    if new_batch_size < 1 or len(data) % new_batch_size:
        raise BatchError(f"{len(data)} rows do not fold into {new_batch_size} equal groups")
    shape = (new_batch_size, len(data) // new_batch_size)
    for name, column in data.tensors().items():
        if is_jagged(column):
            raise BatchError(f"column {name!r} is jagged and has no second axis to fold; pad or pop it first")
    tensors = {name: column.reshape(*shape, *column.shape[1:]) for name, column in data.tensors().items()}
    others = {name: array.reshape(*shape, *array.shape[1:]) for name, array in data.non_tensor_batch.items()}
    return DataProto.from_dict(tensors, others, data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The inverse of `fold_batch_dim`: the first `batch_dims` axes become one."""
    tensors = {name: column.flatten(0, batch_dims - 1) for name, column in data.tensors().items()}
    others = {
        name: array.reshape(-1, *array.shape[batch_dims:]) for name, array in data.non_tensor_batch.items()
    }
    return DataProto.from_dict(tensors, others, data.meta_info)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """The batch with rows from its front repeated at its end until `size_divisor` divides their number.

    Returns:
        The padded batch (the same object if nothing was needed), and how many rows were added.
    """
    if size_divisor < 1:
        raise BatchError(f"a divisor is at least 1, got {size_divisor}")
    missing = -len(data) % size_divisor
    if missing == 0:
        return data, 0
    return data.select_idxs([number % len(data) for number in range(len(data) + missing)]), missing


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """The batch without its last `pad_size` rows; the same object for 0."""
    if not 0 <= pad_size <= len(data):
        raise BatchError(f"{pad_size} rows of padding cannot be taken from a batch of {len(data)} rows")
    return data.slice(0, len(data) - pad_size) if pad_size else data
