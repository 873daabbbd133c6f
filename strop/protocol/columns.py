"""Tensor columns of a batch: dense `[B, ...]`, or jagged `[B, R~, ...]` with rows of their own length.

A jagged column is a `torch.nested` tensor of layout `torch.jagged` whose second axis is ragged: one flat
tensor of values `[N, ...]` and B + 1 offsets into it. The functions here work on values and offsets with
index arithmetic, never row by row, and give no gradients back. Columns that are cut or joined together
share their offsets afterwards when their rows are equally long, so arithmetic between them works.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

# Every public attribute of a jagged tensor goes through Python dispatch (6 to 25 us each, torch 2.13), which
# adds up over columns and chunks; the class and its plain fields are read directly, in this module only.
from torch.nested._internal.nested_tensor import NestedTensor


class BatchError(ValueError, AssertionError):
    """A batch, or an operation on it, breaks a rule of the protocol.

    An AssertionError too, because programs written for verl's convention catch that.
    """


def jagged(rows: Sequence[Tensor]) -> Tensor:
    """One jagged column from rows `[R_i, ...]` of any lengths; equal type and trailing axes.

    Raises:
        BatchError: there is no row (a column needs a type), or rows differ in more than their length.
    """
    if not rows:
        raise BatchError("a jagged column of no rows has no type; slice an existing column to 0 rows instead")
    kinds = {(row.dtype, row.device, tuple(row.shape[1:])) for row in rows if row.dim() > 0}
    if len(kinds) != 1 or any(row.dim() == 0 for row in rows):
        shapes = sorted({f"{row.dtype} {list(row.shape)}" for row in rows})
        raise BatchError(
            f"the rows of a jagged column may differ only in their length, got {', '.join(shapes[:4])}; "
            f"convert them to one dtype, device and trailing shape"
        )
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return from_flat(torch.cat(list(rows)), lengths)


def from_flat(values: Tensor, lengths: Tensor) -> Tensor:
    """One jagged column from the values `[N, ...]` of all rows in order and the row lengths `[B]`."""
    offsets = _offsets(lengths.to(values.device))
    if int(offsets[-1]) != len(values):
        raise BatchError(
            f"row lengths add up to {int(offsets[-1])}, but there are {len(values)} values; pass the lengths "
            f"of exactly these rows"
        )
    return _column(values, offsets)


def jagged_like(column: Tensor, values: Tensor) -> Tensor:
    """A jagged column with the row lengths of `column` and other values `[N, ...]`; shares its offsets."""
    flat_values, offsets = parts(column)
    if len(flat_values) != len(values):
        raise BatchError(
            f"the column has {len(flat_values)} values in all, got {len(values)} to put in their place"
        )
    return _column(values, offsets)


def is_jagged(column: Tensor) -> bool:
    """True for a jagged column, False for a dense one.

    Raises:
        BatchError: a nested tensor of another layout, or ragged along another axis than the second.
    """
    if isinstance(column, NestedTensor):
        if column._ragged_idx == 1:
            return True
    elif not column.is_nested:
        return False
    raise BatchError(
        f"a ragged column is a torch.nested tensor with layout=torch.jagged and a ragged second axis, "
        f"got layout {column.layout}; build it with strop.protocol.jagged"
    )


def parts(column: Tensor) -> tuple[Tensor, Tensor]:
    """Values `[N, ...]` and offsets `[B + 1]` of a jagged column, without holes between the rows."""
    if not is_jagged(column):
        raise BatchError(f"expected a jagged column, got a dense one of shape {list(column.shape)}")
    values, offsets, lengths = _raw(column)
    if lengths is None:
        return values[: int(offsets[-1])], offsets
    closed = _offsets(lengths)
    return values.index_select(0, _runs(offsets[:-1], closed)), closed


def row_lengths(column: Tensor) -> Tensor:
    """Length of each row: `[B]` int64; of a dense column, its width for each row."""
    if is_jagged(column):
        _, offsets, lengths = _raw(column)
        return (offsets.diff() if lengths is None else lengths).to(torch.int64)
    if column.dim() < 2:
        raise BatchError(f"a column of shape {list(column.shape)} holds one value per row: no row lengths")
    return torch.full((column.shape[0],), column.shape[1], dtype=torch.int64, device=column.device)


def rows(column: Tensor, which: Iterable[int] | None = None) -> list[Tensor]:
    """The rows of a column, tensors `[R_i, ...]` that share its memory: those of these numbers, or all."""
    if not is_jagged(column):
        return list(column.unbind(0)) if which is None else [column[row] for row in which]
    values, offsets = parts(column)
    if which is None:
        return list(torch.split(values, offsets.diff().tolist()))
    ends = offsets.tolist()
    return [values[ends[row] : ends[row + 1]] for row in which]


def flat(column: Tensor, mask: Tensor | None = None) -> Tensor:
    """All values of a column in row order: `[N, ...]`.

    Args:
        column: jagged, or dense `[B, R, ...]`.
        mask: `[B, R]` bool, for a dense column: which positions hold values; without it, all.
    """
    if is_jagged(column):
        if mask is not None:
            raise BatchError("a jagged column holds values only and takes no mask; index the result instead")
        return parts(column)[0]
    if mask is None:
        return column.flatten(0, 1)
    return _take_mask(column, mask)


def from_padded(dense: Tensor, mask: Tensor) -> Tensor:
    """A jagged column of the positions of `dense` [B, R, ...] where `mask` [B, R] is true, in order."""
    return _column(_take_mask(dense, mask), _offsets(mask.to(torch.bool).sum(1)))


def to_padded(column: Tensor, pad_value: float, *, side: Literal["left", "right"] = "right") -> Tensor:
    """A dense column `[B, R, ...]`, R its longest row, filled with `pad_value` on one side.

    A dense column is returned as it is.
    """
    if side not in ("left", "right"):
        raise BatchError(f"padding goes to the left or to the right, got side={side!r}")
    if not is_jagged(column):
        return column
    values, offsets = parts(column)
    lengths = offsets.diff()
    width = int(lengths.max()) if len(lengths) else 0
    position = torch.arange(width, device=values.device)
    if side == "right":
        mask = position < lengths[:, None]  # [B, R]
    else:
        mask = position >= width - lengths[:, None]  # [B, R]
    padded = values.new_full((len(lengths), width, *values.shape[1:]), pad_value)
    return padded.masked_scatter_(_spread(mask, padded), values)


def padded(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A column as [B, R], R the longest row, with zeros behind; one with a number per row as it is."""
    return to_padded(tensors[name], 0.0)


def take_rows(column: Tensor, index: Tensor) -> Tensor:
    """The rows named by `index` [M] int64 (0 to B - 1, repeats allowed), in its order, copied."""
    return take_columns({"": column}, index)[""]


def take_columns(columns: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    """`take_rows` of several columns; equal raggedness is computed once and shared by the results."""
    rows = {
        name: column.index_select(0, index.to(column.device))
        for name, column in columns.items()
        if not is_jagged(column)
    }
    for offsets, members in _equally_ragged(columns):
        position = index.to(offsets.device)
        closed = _offsets(offsets.diff().index_select(0, position))
        positions = _runs(offsets[:-1].index_select(0, position), closed)
        for name, values in members.items():
            rows[name] = _column(values.index_select(0, positions), closed)
    return {name: rows[name] for name in columns}


def slice_columns(columns: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Rows `start` to `stop` (0 <= start <= stop <= B) of several columns, without a copy of values."""
    sliced = {name: column[start:stop] for name, column in columns.items() if not is_jagged(column)}
    for offsets, members in _equally_ragged(columns):
        first, last = int(offsets[start]), int(offsets[stop])
        closed = offsets[start : stop + 1] - offsets[start]
        for name, values in members.items():
            sliced[name] = _column(values[first:last], closed)
    return {name: sliced[name] for name in columns}


def cat_columns(columns: Sequence[Tensor], *, name: str = "") -> Tensor:
    """The rows of all columns, one after another; all dense with equal rows, or all jagged.

    Raises:
        BatchError: the columns differ in type, device, layout or row shape; the message has `name`.
    """
    if not columns:
        raise BatchError(f"column {name!r}: nothing to join")
    kinds = {_kind(column): number for number, column in reversed(list(enumerate(columns)))}
    if len(kinds) > 1:
        firsts = sorted((number, kind) for kind, number in kinds.items())
        described = "; ".join(f"part {number}: {kind}" for number, kind in firsts)
        raise BatchError(
            f"column {name!r} cannot be joined, its parts differ ({described}). Token columns of different "
            f"widths join when they are jagged: strop.protocol.from_padded(column, mask)"
        )
    if len(columns) == 1:
        return columns[0]
    if not is_jagged(columns[0]):
        return torch.cat(list(columns))
    pieces = [parts(column) for column in columns]
    lengths = torch.cat([offsets.diff() for _, offsets in pieces])
    return _column(torch.cat([values for values, _ in pieces]), _offsets(lengths))


def cat_all(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """`cat_columns` of every column of several batches with the same names; shares equal offsets."""
    joined = {name: cat_columns([batch[name] for batch in batches], name=name) for name in batches[0]}
    return share_offsets(joined)


def cut_rows(column: Any, n: int, name: str) -> Any:
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


def share_offsets(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same columns; those whose rows are equally long share one offsets tensor."""
    shared = dict(columns)
    for offsets, members in _equally_ragged(columns):
        if len(members) > 1:
            shared |= {name: _column(values, offsets) for name, values in members.items()}
    return shared


def copied(column: Tensor) -> Tensor:
    """The same column in memory of its own."""
    if not is_jagged(column):
        return column.clone()
    values, offsets = parts(column)
    return _column(values.clone(), offsets)


def compact(values: Tensor) -> Tensor:
    """The same values in a storage that holds nothing else; itself when that is so already."""
    is_whole = values.numel() * values.element_size() == values.untyped_storage().nbytes()
    return (
        values if is_whole and values.is_contiguous() else values.clone(memory_format=torch.contiguous_format)
    )


def same_column(left: Tensor, right: Tensor) -> bool:
    """True if two columns hold the same values, NaN equal to NaN.

    Columns in the same memory are the same without a look at their values; only a copy is compared.
    """
    if left is right:
        return True
    if _kind(left) != _kind(right) or len(left) != len(right):
        return False
    if not is_jagged(left):
        return _same_values(left, right)
    (values, offsets), (other, other_offsets) = parts(left), parts(right)
    return _same_values(offsets, other_offsets) and _same_values(values, other)


def _same_values(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    if left.data_ptr() == right.data_ptr() and left.stride() == right.stride():
        return True
    if torch.equal(left, right):
        return True
    if not (left.is_floating_point() or left.is_complex()):
        return False
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def _kind(column: Tensor) -> str:
    """Properties that two columns must share to be joined: layout, type, device and the shape of a row."""
    device = "" if column.device.type == "cpu" else f" on {column.device}"
    if is_jagged(column):
        return f"jagged {column.dtype} rows [R~{''.join(f', {size}' for size in column.shape[2:])}]{device}"
    return f"dense {column.dtype} rows {list(column.shape[1:])}{device}"


def _column(values: Tensor, offsets: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets)


def _raw(column: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Values, offsets and (for a column with holes) lengths, as torch stores them."""
    nested = cast(Any, column)
    return nested._values, nested._offsets, nested._lengths


def _offsets(lengths: Tensor) -> Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _runs(starts: Tensor, offsets: Tensor) -> Tensor:
    """Positions of rows that begin at `starts` [M] and are to be laid out by `offsets` [M + 1]: [N]."""
    total = int(offsets[-1])
    shift = torch.repeat_interleave(starts - offsets[:-1], offsets.diff(), output_size=total)
    return shift + torch.arange(total, device=starts.device)


def _equally_ragged(columns: Mapping[str, Tensor]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """The jagged columns, those with rows of equal lengths together: offsets, and the values of each by name."""
    groups: list[tuple[Tensor, dict[str, Tensor]]] = []
    for name, column in columns.items():
        if not is_jagged(column):
            continue
        values, offsets = parts(column)
        for group_offsets, members in groups:  # B + 1 numbers are compared
            if group_offsets is offsets or (
                group_offsets.device == offsets.device and torch.equal(group_offsets, offsets)
            ):
                members[name] = values
                break
        else:
            groups.append((offsets, {name: values}))
    return groups


def _spread(mask: Tensor, like: Tensor) -> Tensor:
    """A mask [B, R] with the axes of `like` [B, R, ...]."""
    return mask.reshape(*mask.shape, *([1] * (like.dim() - 2))).expand_as(like)


def _take_mask(dense: Tensor, mask: Tensor) -> Tensor:
    if dense.is_nested or dense.shape[:2] != mask.shape:
        raise BatchError(
            f"a mask marks the positions of a dense column: its shape {list(mask.shape)} must be the first "
            f"two axes of the column's {'jagged' if dense.is_nested else list(dense.shape)}"
        )
    chosen = dense.masked_select(_spread(mask.to(torch.bool), dense))
    return chosen.reshape(-1, *dense.shape[2:])
