"""What a DataProtoFuture is made of: pending batches, the rows wanted of them, and the order of the rows.

A `ColumnGroup` is some columns of a future: parts laid end to end, each a pending batch with the rows wanted of
it, or a future in its turn. Lengths are asked with `num_rows`, which waits for a computation but moves no
row; `fetched` alone moves rows, and asks each pending batch once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from strop.protocol.batch import DataProto
from strop.protocol.columns import BatchError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Index = NDArray[np.int64]
"""Row numbers, 0 and up."""


class Pending(Protocol[T_co]):
    """A value that is being computed; `concurrent.futures.Future` is one."""

    def result(self) -> T_co:
        """Wait for the value; an error of the computation is raised here."""


class PendingRows(Pending[DataProto], Protocol):
    """A batch that is being computed elsewhere. Its runtime answers for the deadline of both methods."""

    def num_rows(self) -> int:
        """Wait for the computation, never for the rows; an error of the computation is raised here."""


@runtime_checkable
class PendingColumns(PendingRows, Protocol):
    """A pending batch that can hand out some columns and leave the others where they are."""

    def columns(
        self, batch_keys: Sequence[str] | None, non_tensor_batch_keys: Sequence[str] | None
    ) -> DataProto:
        """All rows of the named columns that the batch has, with its facts; None: all of that kind.

        Names it does not have are left out: they may be columns of another group of the future.
        """


@dataclass(frozen=True)
class Done(Generic[T]):
    """A value that is there already."""

    value: T
    """The value."""

    def result(self) -> T:
        """The value, at once."""
        return self.value

    def num_rows(self) -> int:
        """Rows of the value.

        Raises:
            TypeError: the value is no batch.
        """
        if not isinstance(self.value, DataProto):
            raise TypeError(f"rows are counted of a DataProto, but this value is {type(self.value).__name__}")
        return len(self.value)


@dataclass(frozen=True)
class Columns:
    """Which columns are wanted."""

    batch_keys: tuple[str, ...] | None = None
    """Tensor columns; None: all."""
    non_tensor_batch_keys: tuple[str, ...] | None = None
    """Other columns; None: all."""

    def are_all(self) -> bool:
        """True when nothing is left out."""
        return self.batch_keys is None and self.non_tensor_batch_keys is None

    def both(self, other: Columns) -> Columns:
        """What is wanted here and there."""
        return Columns(
            _common(self.batch_keys, other.batch_keys),
            _common(self.non_tensor_batch_keys, other.non_tensor_batch_keys),
        )

    def named(self, other: Columns) -> Columns:
        """Of what is wanted here and there, the columns that are named here."""
        both = self.both(other)
        return Columns(
            None if self.batch_keys is None else both.batch_keys,
            None if self.non_tensor_batch_keys is None else both.non_tensor_batch_keys,
        )

    def within(self, data: DataProto) -> DataProto:
        """The wanted columns that a batch has, as views, with all its facts."""
        if self.are_all():
            return data
        return data.select(
            _common(self.batch_keys, tuple(data.tensors())),
            _common(self.non_tensor_batch_keys, tuple(data.non_tensor_batch)),
        )

    def missing(self, data: DataProto) -> list[str]:
        """The wanted columns that a batch does not have."""
        wanted = [*(self.batch_keys or ()), *(self.non_tensor_batch_keys or ())]
        found = {*data.tensors(), *data.non_tensor_batch}
        return [name for name in wanted if name not in found]


def _common(wanted: tuple[str, ...] | None, other: tuple[str, ...] | None) -> tuple[str, ...] | None:
    if wanted is None or other is None:
        return other if wanted is None else wanted
    return tuple(name for name in wanted if name in other)


class FetchCache:
    """What one `get` has fetched so far, so that nothing is fetched twice."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, Columns], DataProto] = {}

    def of(self, source: PendingRows, columns: Columns) -> DataProto:
        """The wanted columns of a pending batch that they belong to."""
        whole = (id(source), Columns())
        if whole not in self._held and not columns.are_all() and isinstance(source, PendingColumns):
            narrow = (id(source), columns)
            if narrow not in self._held:
                self._held[narrow] = source.columns(columns.batch_keys, columns.non_tensor_batch_keys)
            return self._held[narrow]
        if whole not in self._held:
            self._held[whole] = source.result()
        return columns.within(self._held[whole])


class LazyRows(Protocol):
    """Rows that are elsewhere: a part of a column group."""

    def num_rows(self) -> int:
        """How many; waits for the computation."""

    def known_rows(self) -> int | None:
        """How many, or None where that cannot be said without waiting."""

    def wait(self) -> object:
        """Return when the computation is over."""

    def partition(self, chosen: Sequence[Index]) -> Sequence[LazyRows]:
        """For each entry of `chosen`, those rows of this part."""

    def narrowed(self, columns: Columns) -> LazyRows:
        """The same rows without columns that are at hand and not wanted."""

    def fetched(self, held: FetchCache, columns: Columns) -> DataProto:
        """The rows, with those of the wanted columns that they have."""


@dataclass(frozen=True, eq=False)
class PendingPart:
    """Rows of one pending batch, in the order they have there, each once."""

    source: PendingRows
    """The batch."""
    rows: range | Index | None = None
    """The rows wanted, ascending; None: all, however many they turn out to be."""

    def num_rows(self) -> int:
        """How many; waits for the computation where all are wanted."""
        return self.source.num_rows() if self.rows is None else len(self.rows)

    def known_rows(self) -> int | None:
        """How many, or None where that takes waiting."""
        return self.num_rows() if self.rows is not None or isinstance(self.source, Done) else None

    def wait(self) -> None:
        """Return when the batch is computed."""
        self.source.num_rows()

    def partition(self, chosen: Sequence[Index]) -> list[PendingPart]:
        """The rows of each entry, which are ascending and without repeats."""
        return [PendingPart(self.source, _rows_of_rows(self.rows, rows)) for rows in chosen]

    def narrowed(self, columns: Columns) -> PendingPart:
        """The same rows; of a batch that is here already, without unwanted columns."""
        if not isinstance(self.source, Done):
            return self
        return PendingPart(Done(columns.within(self.source.value)), self.rows)

    def fetched(self, held: FetchCache, columns: Columns) -> DataProto:
        """The rows, with those of the wanted columns that they have."""
        return _rows_of_batch(held.of(self.source, columns), self.rows)

    def __reduce__(self) -> tuple[Any, ...]:
        """What travels to another process: of a batch that is here already, only the wanted rows."""
        if isinstance(self.source, Done) and self.rows is not None:
            return PendingPart, (Done(_rows_of_batch(self.source.value, self.rows)), None)
        return PendingPart, (self.source, self.rows)


@dataclass(frozen=True, eq=False)
class ColumnGroup:
    """Some columns of a future, for all its rows."""

    parts: tuple[LazyRows, ...]
    """What holds the rows; at least one."""
    order: Index | None = None
    """Row i is row order[i] of the parts laid end to end; None: as they lie."""
    sizes: tuple[int, ...] | None = None
    """Rows that each part was asked for, which `order` is about; None: `order` fits the parts for certain."""
    joins: bool = True
    """False for a single part whose facts stay as they are, instead of being joined as in a concat."""

    def num_rows(self) -> int:
        """How many; waits for the computation of all parts."""
        lengths = self._lengths()
        order = self._order(lengths)
        return sum(lengths) if order is None else len(order)

    def known_rows(self) -> int | None:
        """How many, or None where that takes waiting."""
        lengths = [part.known_rows() for part in self.parts]
        return None if None in lengths else self.num_rows()

    def wait(self) -> None:
        """Return when all parts are computed."""
        for part in self.parts:
            part.wait()

    def narrowed(self, columns: Columns) -> ColumnGroup:
        """The same rows without columns that are at hand and not wanted."""
        return ColumnGroup(
            tuple(part.narrowed(columns) for part in self.parts), self.order, self.sizes, self.joins
        )

    def partition(self, chosen: Sequence[Index]) -> list[ColumnGroup]:
        """For each entry of `chosen` (any order, repeats allowed) those rows, of the parts that hold them."""
        lengths = self._lengths()
        order = self._order(lengths)
        bounds = np.cumsum([0, *lengths])
        wanted: list[list[Index]] = [[] for _ in self.parts]
        layouts: list[tuple[list[int], Index | None]] = []
        for index in chosen:
            kept, place = _ascending(index if order is None else order[index])
            starts = np.searchsorted(kept, bounds)
            used = np.flatnonzero(starts[1:] > starts[:-1]).tolist() if len(kept) else _columns_from(lengths)
            for number in used:
                wanted[number].append(kept[starts[number] : starts[number + 1]] - bounds[number])
            layouts.append((used, place))
        pieces = [iter(part.partition(rows)) for part, rows in zip(self.parts, wanted, strict=True)]
        return [
            ColumnGroup(tuple(next(pieces[number]) for number in used), place, None, self.joins)
            for used, place in layouts
        ]

    def fetched(self, held: FetchCache, columns: Columns) -> DataProto:
        """The rows, with those of the wanted columns that they have."""
        data = [part.fetched(held, columns) for part in self.parts]
        joined = DataProto.concat(data) if self.joins else data[0]
        order = self.order if self.sizes is None else self._order(self._lengths())
        return _rows_of_batch(joined, order)

    def _lengths(self) -> list[int]:
        return [part.num_rows() for part in self.parts]

    def _order(self, lengths: Sequence[int]) -> Index | None:
        if self.sizes is None or tuple(lengths) == self.sizes:
            return self.order
        if not any(lengths):  # parts that hold facts and no rows need no order
            return None
        number = next(n for n, length in enumerate(lengths) if length != self.sizes[n])
        raise BatchError(
            f"part {number} of a result has {lengths[number]} rows, but {self.sizes[number]} rows were asked "
            f"of it, so the result cannot be put into the order of the caller's rows; return one row for "
            f"each row, or pass the batch without a Partition"
        )


def _columns_from(lengths: Sequence[int]) -> list[int]:
    """Parts that tell the columns of no rows: the smallest that has rows; else all, as some may lack columns."""
    filled = [number for number, length in enumerate(lengths) if length]
    return [min(filled, key=lambda number: lengths[number])] if filled else list(range(len(lengths)))


def _ascending(positions: Index) -> tuple[Index, Index | None]:
    """The same positions ascending and each once, and where among them each one is (None: at its own place)."""
    if (positions[1:] > positions[:-1]).all():
        return positions, None
    return np.unique(positions, return_inverse=True)


def _rows_of_rows(rows: range | Index | None, chosen: Index) -> range | Index:
    """Entries `chosen` (ascending) of `rows`; a range where they follow one another, which travels lightly."""
    if isinstance(rows, range):
        chosen = chosen + rows.start
    elif rows is not None:
        chosen = rows[chosen]
    if not len(chosen):
        return range(0)
    first, last = int(chosen[0]), int(chosen[-1])
    return range(first, last + 1) if last - first + 1 == len(chosen) else chosen


def _rows_of_batch(data: DataProto, rows: range | Index | None) -> DataProto:
    """Those rows of a batch, as a view where they follow one another; a batch without columns as it is."""
    if rows is None or (data.batch is None and not data.non_tensor_batch):
        return data
    return data.slice(rows.start, rows.stop) if isinstance(rows, range) else data.select_idxs(rows)
