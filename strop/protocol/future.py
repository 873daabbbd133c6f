"""A batch that workers still hold, cut, joined and passed on without a look at its rows.

The controller chains worker calls through futures: what it does to one (choose rows or columns, unite, cut,
join) is written down and done where the rows are used, so that columns of the size of the tokens go from
worker to worker. Whoever made the pending parts (the runtime of the worker group) answers for their
deadline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from strop.protocol.batch import DataProto
from strop.protocol.columns import BatchError
from strop.protocol.indices import Rows, balanced_ranges, row_numbers
from strop.protocol.merging import METRICS, merged_meta_info
from strop.protocol.pieces import ColumnGroup, Columns, Done, FetchCache, Index, PendingPart, PendingRows


@dataclass(frozen=True, eq=False, repr=False)
class DataProtoFuture:
    """A batch that is elsewhere; its operations are those of DataProto and move nothing before `get`.

    Made by `DataProtoFuture.of` and `future_of`. It travels to other processes when its pending parts do.
    What needs the number of rows (len, take, slice, chunk, split) waits for the computation.
    """

    column_groups: tuple[ColumnGroup, ...]
    """Columns that are together, with all rows; `get` unites them."""
    columns: Columns = field(default_factory=Columns)
    """What `get` gives of their columns."""
    meta_info: Mapping[str, Any] = field(default_factory=dict)
    """Facts added to those that the parts bring along."""

    @classmethod
    def of(
        cls, parts: Sequence[PendingRows], *, given: Sequence[Sequence[int] | Index] | None = None
    ) -> DataProtoFuture:
        """The rows of all parts, one after another, or in the order of the rows that the parts were given.

        Args:
            parts: pending batches with the same columns; one without rows may lack them.
            given: for each part, the row numbers of a batch it was computed from, each number 0 to N - 1
                in one part; row i of the future is then what was computed from row i. Nothing is waited
                for; a part that turns out to have another number of rows is an error when the rows are
                counted or fetched, unless no part has rows.

        Raises:
            ValueError: there is no part.
        """
        if not parts:
            raise ValueError("a DataProtoFuture needs at least one part; a group has at least one worker")
        stored = tuple(PendingPart(part) for part in parts)
        if given is None:
            return cls((ColumnGroup(stored),))
        if len(given) != len(parts):
            raise ValueError(f"{len(parts)} parts cannot have been given {len(given)} lists of rows")
        laid_out = np.concatenate([np.asarray(rows, dtype=np.int64) for rows in given])
        return cls((ColumnGroup(stored, np.argsort(laid_out), tuple(len(rows) for rows in given)),))

    # ---------------------------------------------------------------- look

    def __len__(self) -> int:
        """Number of rows; waits until they are computed, and moves none."""
        return self.num_rows()

    def __repr__(self) -> str:
        rows = self.known_rows()
        parts = ", ".join(str(len(group.parts)) for group in self.column_groups)
        return f"DataProtoFuture({'?' if rows is None else rows} rows; parts of its column groups: {parts})"

    def num_rows(self) -> int:
        """The same as `len`.

        Raises:
            BatchError: the parts of a union turn out to have different numbers of rows.
        """
        counts = [group.num_rows() for group in self.column_groups]
        _check_rows(counts)
        return counts[0]

    def known_rows(self) -> int | None:
        """Number of rows where one column group can tell it without waiting, else None."""
        return next((rows for group in self.column_groups if (rows := group.known_rows()) is not None), None)

    def wait(self) -> Self:
        """Return when all rows are computed; an error of a computation is raised here. Nothing is moved."""
        for group in self.column_groups:
            group.wait()
        return self

    def get(self) -> DataProto:
        """Fetch the rows: the parts of each column group joined, the groups united, their facts too.

        `meta_info["metrics"]` of the parts belongs to the call that made them; it is kept (joined as in
        `DataProto.concat`) only where there is one column group.

        Raises:
            BatchError: column groups differ in a column or a fact of the same name, or in their number of rows; or
                a selected column is in none.
        """
        data = self.fetched(FetchCache(), Columns())
        own = data.select()
        own.meta_info = dict(data.meta_info)
        return own

    def fetched(self, held: FetchCache, columns: Columns) -> DataProto:
        """The rows, with those of the given columns that they have; for futures that hold this one."""
        wanted = self.columns.both(columns)
        parts = [group.fetched(held, wanted) for group in self.column_groups]
        if len(parts) > 1:
            parts = [_without_metrics(part) for part in parts]
        data, *others = parts
        for other in others:
            data = data.union(other)
        missing = self.columns.named(columns).missing(data)
        if missing:
            raise BatchError(
                f"column {missing[0]!r} was selected from a DataProtoFuture, but no part of it has that column"
            )
        return data.union(DataProto(meta_info=dict(self.meta_info))) if self.meta_info else data

    # ---------------------------------------------------------------- choose rows

    def take(self, rows: Rows) -> DataProtoFuture:
        """The named rows in the given order (repeats allowed), or those where a mask is true.

        Parts that hold none of them are not fetched by `get`; of no rows at all, one part is fetched, for
        its columns.
        """
        return self._partition([row_numbers(rows, len(self))])[0]

    def select_idxs(self, idxs: Rows) -> DataProtoFuture:
        """The same as `take`, under the name that a DataProto has it."""
        return self.take(idxs)

    def slice(self, start: int | None = None, stop: int | None = None) -> DataProtoFuture:
        """The rows of a Python slice."""
        first, last, _ = slice(start, stop).indices(len(self))
        return self._partition([np.arange(first, max(first, last))])[0]

    def chunk(self, chunks: int) -> list[DataProtoFuture]:
        """Cut into `chunks` futures in row order whose sizes differ by at most one, as `DataProto.chunk`."""
        return self._partition([np.arange(start, stop) for start, stop in balanced_ranges(len(self), chunks)])

    def split(self, split_size: int) -> list[DataProtoFuture]:
        """Cut into futures of `split_size` rows, the last one possibly shorter."""
        if split_size < 1:
            raise BatchError(f"a batch is split into pieces of at least 1 row, got {split_size}")
        length = len(self)
        starts = range(0, length, split_size)
        return self._partition([np.arange(start, min(start + split_size, length)) for start in starts])

    def partition(self, chosen: Sequence[Index]) -> list[DataProtoFuture]:
        """`take` for each entry of `chosen`, which holds row numbers from 0; counts the rows once."""
        length = len(self)
        return self._partition([row_numbers(rows, length) for rows in chosen])

    def _partition(self, chosen: Sequence[Index]) -> list[DataProtoFuture]:
        partitioned = [group.partition(chosen) for group in self.column_groups]
        return [
            dataclasses.replace(self, column_groups=column_groups)
            for column_groups in zip(*partitioned, strict=True)
        ]

    # ---------------------------------------------------------------- choose columns

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
    ) -> DataProtoFuture:
        """The chosen columns; a list that is left out means all of that kind.

        Parts that can hand out single columns (`PendingColumns`) move only these.

        Raises:
            BatchError: a column was left out by an earlier selection. One that no column group has is an error of
                `get`.
        """
        columns = Columns(
            _narrowed(self.columns.batch_keys, batch_keys),
            _narrowed(self.columns.non_tensor_batch_keys, non_tensor_batch_keys),
        )
        column_groups = tuple(group.narrowed(columns) for group in self.column_groups)
        return dataclasses.replace(self, column_groups=column_groups, columns=columns)

    def narrowed(self, columns: Columns) -> DataProtoFuture:
        """The same rows without columns that are at hand and not wanted; for futures that hold this one."""
        wanted = self.columns.both(columns)
        return dataclasses.replace(
            self, column_groups=tuple(group.narrowed(wanted) for group in self.column_groups)
        )

    def union(self, other: DataProtoFuture | DataProto) -> DataProtoFuture:
        """The columns and facts of both; a name in both must mean the same, which `get` finds out.

        Nothing is waited for: numbers of rows that are not known yet are compared when the rows are
        counted. A batch without columns adds its facts.
        """
        if isinstance(other, DataProto) and other.batch is None and not other.non_tensor_batch:
            return dataclasses.replace(self, meta_info=merged_meta_info(self.meta_info, other.meta_info))
        right = future_of(other)
        _check_rows([rows for rows in (self.known_rows(), right.known_rows()) if rows is not None])
        meta_info = merged_meta_info(self.meta_info, right.meta_info)
        return DataProtoFuture((*self._as_column_groups(), *right._as_column_groups()), meta_info=meta_info)

    def _as_column_groups(self) -> tuple[ColumnGroup, ...]:
        return self.column_groups if self.columns.are_all() else (ColumnGroup((self,), joins=False),)

    # ---------------------------------------------------------------- more rows

    @staticmethod
    def concat(data: Sequence[DataProtoFuture | DataProto]) -> DataProtoFuture:
        """The rows of all, one after another, as `DataProto.concat`. Nothing is waited for."""
        if not data:
            raise BatchError("there is nothing to concat; pass at least one future")
        parts: list[PendingPart | DataProtoFuture] = []
        for future in map(future_of, data):
            parts.extend(_plain_parts(future) or [future])
        return DataProtoFuture((ColumnGroup(tuple(parts)),))


def future_of(data: DataProto | DataProtoFuture) -> DataProtoFuture:
    """A batch that is here already, as a future; a future as it is."""
    if isinstance(data, DataProtoFuture):
        return data
    return DataProtoFuture((ColumnGroup((PendingPart(Done(data)),), joins=False),))


def _plain_parts(future: DataProtoFuture) -> list[PendingPart]:
    """The parts of a future that is nothing but a row of them; of any other, none."""
    group = future.column_groups[0]
    if (
        len(future.column_groups) > 1
        or future.meta_info
        or not future.columns.are_all()
        or group.order is not None
    ):
        return []
    stored = [part for part in group.parts if isinstance(part, PendingPart)]
    return stored if len(stored) == len(group.parts) else []


def _check_rows(counts: Sequence[int]) -> None:
    for count in counts:
        if count != counts[0]:
            raise BatchError(f"a union needs equal rows, got {counts[0]} and {count}")


def _narrowed(earlier: tuple[str, ...] | None, chosen: Sequence[str] | None) -> tuple[str, ...] | None:
    if chosen is None:
        return earlier
    names = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    for name in names:
        if earlier is not None and name not in earlier:
            raise BatchError(
                f"column {name!r} was left out of this DataProtoFuture before; it keeps "
                f"{', '.join(earlier) or 'nothing'}"
            )
    return names


def _without_metrics(data: DataProto) -> DataProto:
    meta_info = [name for name in data.meta_info if name != METRICS]
    return data.select(meta_info_keys=meta_info) if METRICS in data.meta_info else data
