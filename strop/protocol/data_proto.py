"""DataProto: the batch that flows between the controller and the workers.

A batch is data. Its operations return a new object whose tensors may share memory with this one; only
`pop`, `rename` and `reorder` change the object itself, as their documentation says.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, overload

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from strop.protocol import columns as cols
from strop.protocol.columns import BatchError
from strop.protocol.indices import Rows, balanced_ranges, mini_batch_rows, row_numbers
from strop.protocol.merging import (
    check_same_columns,
    chosen,
    joined_meta_info,
    merged_meta_info,
    object_array,
    same,
)


@dataclass(eq=False)
class DataProtoItem:
    """One row of a batch."""

    batch: TensorDict | None = None
    """The row of each tensor column; of a jagged column, a tensor of the row's own length."""
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    """The value of each other column."""
    meta_info: dict[str, Any] = field(default_factory=dict)
    """The facts of the batch, the same object."""


@dataclass(eq=False, repr=False)
class DataProto:
    """Samples as rows: tensor columns, other columns of the same length, and facts about all of them."""

    batch: TensorDict | None = None
    """Tensor columns, dense `[B, ...]` or jagged `[B, R~, ...]`; exactly one batch dimension."""
    non_tensor_batch: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Other columns: numpy arrays of B rows, of dtype object unless they hold plain numbers."""
    meta_info: dict[str, Any] = field(default_factory=dict)
    """Facts about all rows (temperature, version); never a command to the next worker."""

    def __post_init__(self) -> None:
        self.check_consistency()

    # ---------------------------------------------------------------- make

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | NDArray[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> DataProto:
        """A batch from tensor columns and other columns; lists become object arrays of one axis.

        Raises:
            BatchError: columns differ in their number of rows (both are named), or `num_batch_dims` is
                not 1: a batch has one leading dimension, `fold_batch_dim` makes two of it.
        """
        if num_batch_dims != 1:
            raise BatchError(f"a batch has one leading dimension, got num_batch_dims={num_batch_dims}")
        others = {
            name: column if isinstance(column, np.ndarray) else object_array(column)
            for name, column in (non_tensors or {}).items()
        }
        return cls(
            batch=_tensor_dict(tensors, None) if tensors else None,
            non_tensor_batch=others,
            meta_info=dict(meta_info or {}),
        )

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Tensor | NDArray[Any]], meta_info: Mapping[str, Any] | None = None
    ) -> DataProto:
        """A batch from one dictionary, split by type: tensors, and numpy arrays for the other columns."""
        tensors = {name: column for name, column in data.items() if isinstance(column, Tensor)}
        others = {name: column for name, column in data.items() if isinstance(column, np.ndarray)}
        for name, column in data.items():
            if name not in tensors and name not in others:
                raise BatchError(
                    f"column {name!r} is a {type(column).__name__}; columns are torch tensors or numpy arrays"
                )
        return cls.from_dict(tensors, others, meta_info)

    @classmethod
    def from_tensordict(cls, tensordict: TensorDict, meta_info: Mapping[str, Any] | None = None) -> DataProto:
        """A batch from a TensorDict: per-row non-tensors become columns, single ones become meta_info."""
        from strop.protocol.tensordict import columns_from_tensordict  # tensordict: slow to import

        tensors, others, facts = columns_from_tensordict(tensordict)
        return cls.from_dict(tensors, others, {**facts, **(meta_info or {})})

    def to_tensordict(self) -> TensorDict:
        """One TensorDict with all columns and facts; the inverse of `from_tensordict`."""
        from strop.protocol.tensordict import tensordict_from_columns

        return tensordict_from_columns(self.tensors(), self.non_tensor_batch, self.meta_info, len(self))

    # ---------------------------------------------------------------- look

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(column) for column in self.non_tensor_batch.values()), 0)

    def __repr__(self) -> str:
        tensors = [f"{name} {_describe(column)}" for name, column in self.tensors().items()]
        others = [f"{name} {column.dtype}" for name, column in self.non_tensor_batch.items()]
        return f"DataProto({len(self)} rows; {', '.join(tensors + others)}; meta_info {list(self.meta_info)})"

    def tensors(self) -> dict[str, Tensor]:
        """The tensor columns as a plain dictionary."""
        if self.batch is None:
            return {}
        return {str(name): column for name, column in self.batch.items() if isinstance(column, Tensor)}

    def check_consistency(self) -> None:
        """Raise BatchError unless all columns are of the right kind and have the same number of rows."""
        counts: dict[str, int] = {}
        if self.batch is not None:
            if len(self.batch.batch_size) != 1:
                raise BatchError(f"a batch has one leading dimension, got {list(self.batch.batch_size)}")
            for name, tensor in self.batch.items():
                if not isinstance(tensor, Tensor):
                    raise BatchError(f"column {name!r} of batch is no tensor; put it into non_tensor_batch")
                cols.is_jagged(tensor)
                counts[str(name)] = len(self)  # a TensorDict accepts no column of another length
        others: dict[str, Any] = dict(self.non_tensor_batch)  # a caller may have put anything there
        for name, array in others.items():
            if not isinstance(array, np.ndarray) or array.ndim == 0:
                raise BatchError(
                    f"column {name!r} of non_tensor_batch is a {type(array).__name__}, not an array of rows; "
                    f"use DataProto.from_dict, which makes arrays of lists"
                )
            counts[name] = len(array)
        length = len(self)
        for name, count in counts.items():
            if count != length:
                other = next((f"column {name!r}" for name in counts if counts[name] == length), "the batch")
                raise BatchError(f"column {name!r} has {count} rows, but {other} has {length}")

    # ---------------------------------------------------------------- choose rows

    @overload
    def __getitem__(self, item: int) -> DataProtoItem: ...
    @overload
    def __getitem__(self, item: slice | Rows) -> DataProto: ...
    def __getitem__(self, item: int | slice | Rows) -> DataProtoItem | DataProto:
        """One row for an integer; a batch for a slice, row numbers or a mask. Shares meta_info."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer) and not isinstance(item, bool):
            return self._row(int(item))
        if isinstance(item, list | tuple | np.ndarray | Tensor):
            return self.select_idxs(item)
        raise TypeError(
            f"rows are chosen by an integer, a slice, a list, an array or a tensor, got {type(item).__name__}"
        )

    def _row(self, number: int) -> DataProtoItem:
        index = number + len(self) if number < 0 else number
        if not 0 <= index < len(self):
            raise IndexError(f"row {number} does not exist in a batch of {len(self)} rows")
        batch = None
        if self.batch is not None:
            cut = cols.slice_columns(self.tensors(), index, index + 1)
            row = {name: cols.rows(column)[0] for name, column in cut.items()}
            batch = TensorDict(row, batch_size=[])
        others = {name: column[index] for name, column in self.non_tensor_batch.items()}
        return DataProtoItem(batch, others, self.meta_info)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """The rows of a Python slice; with step 1 the tensors share this batch's memory."""
        first, last, stride = slice(start, end, step).indices(len(self))
        if stride != 1:
            return self.select_idxs(np.arange(first, last, stride))
        last = max(first, last)
        batch = None
        if self.batch is not None:
            batch = _tensor_dict(cols.slice_columns(self.tensors(), first, last), last - first)
        others = {name: column[first:last] for name, column in self.non_tensor_batch.items()}
        return DataProto(batch, others, self.meta_info)

    def select_idxs(self, idxs: Rows) -> DataProto:
        """The named rows in the given order (repeats allowed), or those where a mask is true; copied."""
        index = row_numbers(idxs, len(self))
        batch = None
        if self.batch is not None:
            batch = _tensor_dict(cols.take_columns(self.tensors(), torch.from_numpy(index)), len(index))
        others = {name: column[index] for name, column in self.non_tensor_batch.items()}
        return DataProto(batch, others, self.meta_info)

    def take(self, rows: Rows) -> DataProto:
        """The same, but as views where the rows follow one another."""
        index = row_numbers(rows, len(self))
        first = int(index[0]) if len(index) else 0
        if np.array_equal(index, np.arange(first, first + len(index))):
            return self.slice(first, first + len(index))
        return self.select_idxs(index)

    def reorder(self, indices: Rows) -> None:
        """Put the rows of this batch into the given order, in place; the tensors themselves are new."""
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def chunk(self, chunks: int, *, equal: bool = False) -> list[DataProto]:
        """Cut into `chunks` batches in row order whose sizes differ by at most one; views.

        With more chunks than rows, the last ones are empty. `equal=True` refuses sizes that differ.
        """
        if equal and len(self) % chunks:
            raise BatchError(
                f"{len(self)} rows do not make {chunks} equal chunks; leave out equal=True, or pad with "
                f"pad_dataproto_to_divisor"
            )
        return [self.slice(start, stop) for start, stop in balanced_ranges(len(self), chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Cut into batches of `split_size` rows, the last one possibly shorter; views."""
        if split_size < 1:
            raise BatchError(f"a batch is split into pieces of at least 1 row, got {split_size}")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[DataProto]:
        """Mini-batches of all rows, `epochs` times; the last one of an epoch may be shorter.

        Args:
            mini_batch_size: rows per mini-batch, at least 1.
            epochs: passes over the rows.
            seed: needed to shuffle; the order is a pure function of seed and epoch.
            dataloader_kwargs: `shuffle` (default False) is the one option.
        """
        order = mini_batch_rows(len(self), mini_batch_size, epochs, seed, dataloader_kwargs or {})
        return (self.select_idxs(numbers) for numbers in order)

    # ---------------------------------------------------------------- choose columns

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """The chosen columns and facts, as views; a list that is left out means all of that kind.

        The rows stay where no column does: the result has as many.
        """
        tensors = chosen(self.tensors(), batch_keys, "batch")
        others = chosen(self.non_tensor_batch, non_tensor_batch_keys, "non_tensor_batch")
        facts = self.meta_info
        if meta_info_keys is not None:
            facts = chosen(self.meta_info, meta_info_keys, "meta_info")
        if deepcopy:
            tensors = {name: cols.copied(column) for name, column in tensors.items()}
            others, facts = copy.deepcopy(others), copy.deepcopy(facts)
        keeps_rows = self.batch is not None or (self.non_tensor_batch and not others)
        return DataProto(_tensor_dict(tensors, len(self)) if keeps_rows else None, others, facts)

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> DataProto:
        """Remove columns and facts from this batch, in place, and return them as a batch of their own."""
        tensors = chosen(self.tensors(), batch_keys or (), "batch")
        others = chosen(self.non_tensor_batch, non_tensor_batch_keys or (), "non_tensor_batch")
        facts = chosen(self.meta_info, meta_info_keys or (), "meta_info")
        length = len(self)
        if self.batch is not None:
            remaining = {name: column for name, column in self.tensors().items() if name not in tensors}
            self.batch = _tensor_dict(remaining, length)
        for name in others:
            del self.non_tensor_batch[name]
        if self.batch is None and others and not self.non_tensor_batch:  # the rows stay where no column does
            self.batch = _tensor_dict({}, length)
        for name in facts:
            del self.meta_info[name]
        return DataProto(_tensor_dict(tensors, length) if tensors else None, others, facts)

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> DataProto:
        """Give tensor columns other names, in place; returns this batch."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new):
            raise BatchError(f"{len(old)} columns cannot take {len(new)} names: {old} and {new}")
        tensors = self.tensors()
        names = dict(zip(chosen(tensors, old, "batch"), new, strict=True))
        renamed = [names.get(name, name) for name in tensors]
        if len(set(renamed)) < len(renamed):
            raise BatchError(f"renaming {old} to {new} would give two columns one name")
        self.batch = _tensor_dict(dict(zip(renamed, tensors.values(), strict=True)), len(self))
        return self

    def union(self, other: DataProto) -> DataProto:
        """A batch with the columns and facts of both, which stay as they are.

        A name on both sides must mean the same: the same memory, or equal values (NaN equal to NaN).
        """
        other = other.get()
        if len(self) != len(other) and (_has_columns(self) and _has_columns(other)):
            raise BatchError(f"a union needs equal rows, got {len(self)} and {len(other)}")
        tensors, others = self.tensors(), dict(self.non_tensor_batch)
        for name, column in other.tensors().items():
            if name in tensors and not cols.same_column(tensors[name], column):
                raise BatchError(_overlap(name))
            tensors.setdefault(name, column)
        for name, array in other.non_tensor_batch.items():
            if name in others and not same(others[name], array):
                raise BatchError(_overlap(name))
            others.setdefault(name, array)
        has_batch = self.batch is not None or other.batch is not None
        batch = _tensor_dict(tensors, max(len(self), len(other))) if has_batch else None
        return DataProto(batch, others, merged_meta_info(self.meta_info, other.meta_info))

    # ---------------------------------------------------------------- more rows

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """The rows of all parts, one after another.

        Parts need the same columns; a part without rows may lack them. `meta_info["metrics"]` of all
        parts becomes one dictionary of lists; another fact must be equal wherever it is present.
        """
        if not data:
            raise BatchError("there is nothing to concat; pass at least one batch")
        data = [part.get() for part in data]
        facts = joined_meta_info([part.meta_info for part in data])
        parts = [part for part in data if len(part)]
        parts = parts or [max(data, key=lambda part: len(part.tensors()) + len(part.non_tensor_batch))]
        check_same_columns([(part.tensors(), part.non_tensor_batch) for part in parts])
        batch = None
        if any(part.batch is not None for part in parts):
            joined = cols.cat_all([part.tensors() for part in parts])
            batch = _tensor_dict(joined, sum(len(part) for part in parts))
        others = {
            name: np.concatenate([part.non_tensor_batch[name] for part in parts])
            for name in parts[0].non_tensor_batch
        }
        return DataProto(batch, others, facts)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Each row `repeat_times` times: its copies side by side, or the whole batch over and over."""
        index = np.arange(len(self))
        return self.select_idxs(
            np.repeat(index, repeat_times) if interleave else np.tile(index, repeat_times)
        )

    def sample_level_repeat(self, repeat_times: Sequence[int] | NDArray[Any] | Tensor) -> DataProto:
        """Row i as often as number i of `repeat_times` says, copies side by side."""
        if not isinstance(repeat_times, list | tuple | np.ndarray | Tensor):
            raise TypeError(f"repeat_times holds one count per row, got {type(repeat_times).__name__}")
        counts = np.asarray(repeat_times)
        if counts.shape != (len(self),) or counts.dtype.kind not in "iu" or (counts < 0).any():
            raise BatchError(
                f"repeat_times needs {len(self)} counts of at least 0, one per row, got {counts.tolist()}"
            )
        return self.select_idxs(np.repeat(np.arange(len(self)), counts))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
        """Cut the named columns of width W into n rows of width W / n each; repeat the other columns."""
        names, repeated = split_keys or (), self.repeat(n_split)
        tensors, others = repeated.tensors(), dict(repeated.non_tensor_batch)
        for columns, cut in ((self.tensors(), tensors), (self.non_tensor_batch, others)):
            cut |= {name: cols.cut_rows(columns[name], n_split, name) for name in names if name in columns}
        chosen({**tensors, **others}, names, "batch or non_tensor_batch")
        batch = None if self.batch is None else _tensor_dict(tensors, len(repeated))
        return DataProto(batch, others, self.meta_info)

    def padding(self, padding_size: int, padding_candidate: Literal["first", "last"] = "first") -> DataProto:
        """A batch with `padding_size` copies of the first or last row at its end."""
        if padding_candidate not in ("first", "last"):
            raise BatchError(f"padding copies the 'first' or the 'last' row, got {padding_candidate!r}")
        copied = 0 if padding_candidate == "first" else len(self) - 1
        return self.select_idxs([*range(len(self)), *[copied] * padding_size])

    # ---------------------------------------------------------------- move and keep

    def wait(self) -> Self:
        """Return when the rows are computed. These are; those of a call that does not wait may be elsewhere."""
        return self

    def get(self) -> DataProto:
        """A batch of the caller's own with the same tensors; where workers hold the rows, they are fetched."""
        arrays = {name: array.copy() for name, array in self.non_tensor_batch.items()}
        return DataProto(self.select().batch, arrays, dict(self.meta_info))

    def to(self, device: torch.device | str) -> DataProto:
        """The same batch with its tensors on a device; equal raggedness stays shared."""
        if self.batch is None:
            return DataProto(None, dict(self.non_tensor_batch), self.meta_info)
        moved = cols.share_offsets({name: column.to(device) for name, column in self.tensors().items()})
        return DataProto(_tensor_dict(moved, len(self)), dict(self.non_tensor_batch), self.meta_info)

    def save_to_disk(self, path: str | Path) -> None:
        """Write the batch as a folder of safetensors and JSON; an earlier batch there is replaced at once.

        Raises:
            BatchError: a value has no JSON form (column and row are named), or `path` holds something
                else than a batch.
        """
        from strop.protocol.folder import write_batch

        write_batch(Path(path), self.__getstate__())

    @classmethod
    def load_from_disk(cls, path: str | Path) -> DataProto:
        """Read a batch that `save_to_disk` wrote."""
        data = cls()
        from strop.protocol.folder import read_batch

        data.__setstate__(read_batch(Path(path)))
        data.check_consistency()
        return data

    def __getstate__(self) -> dict[str, Any]:
        """State for another process: only the memory of these rows, not of a batch they view."""
        tensors: dict[str, tuple[Tensor, Tensor | None]] | None = None
        if self.batch is not None:
            tensors = {}
            for name, column in self.tensors().items():
                values, offsets = cols.parts(column) if cols.is_jagged(column) else (column, None)
                tensors[name] = (cols.compact(values), offsets)
        return {
            "length": len(self),
            "tensors": tensors,
            "others": self.non_tensor_batch,
            "facts": self.meta_info,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.batch = None
        if state["tensors"] is not None:
            tensors = {
                name: values if offsets is None else cols.from_flat(values, offsets.diff())
                for name, (values, offsets) in state["tensors"].items()
            }
            self.batch = _tensor_dict(cols.share_offsets(tensors), state["length"])
        self.non_tensor_batch, self.meta_info = state["others"], state["facts"]


def _tensor_dict(tensors: Mapping[str, Tensor], length: int | None) -> TensorDict:
    """A TensorDict of these columns; without `length`, columns of differing lengths are refused."""
    if length is None:
        for name, column in tensors.items():
            if column.dim() == 0:
                raise BatchError(f"column {name!r} is a single number; a column has one row per sample")
        first, length = next((name, len(column)) for name, column in tensors.items())
        for name, column in tensors.items():
            if len(column) != length:
                raise BatchError(f"column {name!r} has {len(column)} rows, but column {first!r} has {length}")
    return TensorDict(dict(tensors), batch_size=[length])


def _has_columns(data: DataProto) -> bool:
    return data.batch is not None or bool(data.non_tensor_batch)


def _overlap(name: str) -> str:
    return (
        f"column {name!r} is on both sides of a union with different values; return only what is new from "
        f"a worker, or pop the column from one side"
    )


def _describe(column: Tensor) -> str:
    dtype = str(column.dtype).removeprefix("torch.")
    if not cols.is_jagged(column):
        return f"{dtype}{list(column.shape)}"
    lengths = cols.row_lengths(column).tolist()
    return f"{dtype}[{len(lengths)}, {min(lengths, default=0)}..{max(lengths, default=0)}]"
