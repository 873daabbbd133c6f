"""Wide columns cut into several narrower rows."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from strop.protocol.columns import BatchError, from_flat, is_jagged, parts


def unfolded_column(column: Tensor, n: int, name: str) -> Tensor:
    """A column `[B, W, ...]` as `[B * n, W / n, ...]`; of a jagged column, each row of its own length."""
    if is_jagged(column):
        values, offsets = parts(column)
        lengths = offsets.diff()
        _check_width(int((lengths % n).max()) if len(lengths) else 0, n, name)
        return from_flat(values, (lengths // n).repeat_interleave(n))
    if column.dim() < 2:
        raise BatchError(f"column {name!r} holds one value per row and cannot be cut into {n} rows")
    _check_width(column.shape[1] % n, n, name)
    return column.reshape(len(column) * n, column.shape[1] // n, *column.shape[2:])


def unfolded_array(array: NDArray[Any], n: int, name: str) -> NDArray[Any]:
    """An array `[B, W, ...]` as `[B * n, W / n, ...]`."""
    if array.ndim < 2:
        raise BatchError(f"column {name!r} holds one value per row and cannot be cut into {n} rows")
    _check_width(array.shape[1] % n, n, name)
    return array.reshape(len(array) * n, array.shape[1] // n, *array.shape[2:])


def _check_width(rest: int, n: int, name: str) -> None:
    if rest:
        raise BatchError(f"column {name!r} has a row whose width {n} does not divide (rest {rest})")
