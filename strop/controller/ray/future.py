"""Batches whose rows stay with the workers that made them: the controller hands on the location of each row.

What is done to such a batch (choose rows or columns, unite, cut, join) waits until it is computed, so that its
rows can be counted, and moves none. Rows move in `get`: a worker that is given the batch calls it, and so does
whoever looks at a column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDict

from strop.controller.partition import Partition
from strop.protocol.columns import BatchError
from strop.protocol.data_proto import DataProto
from strop.protocol.indices import Rows as RowNumbers
from strop.protocol.indices import row_numbers
from strop.protocol.merging import check_same_columns, chosen, joined_meta_info, merged_meta_info

Index = NDArray[np.int32]
"""Small, because it travels."""


@dataclass(frozen=True, kw_only=True)
class BatchSummary:
    """Columns, facts and size of a batch without its rows."""

    num_rows: int
    """Number of rows."""
    tensors: tuple[str, ...]
    """Tensor columns in their order."""
    others: tuple[str, ...]
    """Other columns in their order."""
    facts: Mapping[str, Any]
    """Its meta_info."""

    @classmethod
    def of(cls, data: DataProto) -> Self:
        """Summary of a batch."""
        names = tuple(data.tensors()), tuple(data.non_tensor_batch)
        return cls(num_rows=len(data), tensors=names[0], others=names[1], facts=data.meta_info)


class Source(Protocol):
    """A batch that is computed elsewhere. Its runtime answers for the deadline of both methods."""

    def contents(self) -> BatchSummary:
        """Wait for the computation, never for the rows; an error of the computation is raised here."""

    def columns(self, batch_keys: Sequence[str], non_tensor_batch_keys: Sequence[str]) -> DataProto:
        """Fetch all rows of these columns, which the batch has."""


@dataclass(frozen=True)
class LocalBatch:
    """Source in this process; only its wanted columns and rows are sent."""

    data: DataProto

    def contents(self) -> BatchSummary:
        """Summary of the batch."""
        return BatchSummary.of(self.data)

    def columns(self, batch_keys: Sequence[str], non_tensor_batch_keys: Sequence[str]) -> DataProto:
        """These columns, as views."""
        return self.data.select(batch_keys, non_tensor_batch_keys)


@dataclass(frozen=True, eq=False)
class RowLocations:
    """Locations of the rows of some columns."""

    sources: tuple[Source, ...]
    """At least one, also for no rows: it has the types of the columns."""
    part: Index
    """Row i is in source part[i];"""
    row: Index
    """it is row row[i] there."""

    @classmethod
    def of(cls, sources: Sequence[Source], lengths: Sequence[int]) -> RowLocations:
        """All rows of sources of these lengths, one after another."""
        part = np.repeat(np.arange(len(sources), dtype=np.int32), lengths)
        row = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
        return cls(tuple(sources), part, row)

    def take(self, index: NDArray[np.int64]) -> RowLocations:
        """These rows; of the sources only those that hold them are kept, and for no rows the smallest."""
        part = self.part[index]
        used = np.unique(part)
        if not len(used):
            used = np.array([np.argmin([source.contents().num_rows for source in self.sources])])
        sources = tuple(self.sources[number] for number in used)
        return RowLocations(sources, np.searchsorted(used, part).astype(np.int32), self.row[index])

    @staticmethod
    def concat(parts: Sequence[RowLocations]) -> RowLocations:
        """The rows of all, one after another."""
        firsts = np.cumsum([0, *(len(places.sources) for places in parts)], dtype=np.int32)
        return RowLocations(
            tuple(source for places in parts for source in places.sources),
            np.concatenate([places.part + first for places, first in zip(parts, firsts[:-1], strict=True)]),
            np.concatenate([places.row for places in parts]),
        )

    def rows_of(self, batches: Sequence[DataProto]) -> DataProto:
        """The rows, from the fetched batch of each source."""
        order = np.argsort(self.part, kind="stable")
        pieces = [data.take(self.row[self.part == number]) for number, data in enumerate(batches)]
        return DataProto.concat(pieces).take(np.argsort(order, kind="stable"))

    def to_send(self, tensors: Sequence[str], others: Sequence[str]) -> RowLocations:
        """The same rows; of a local source, cut out with these columns."""
        sources, row = list(self.sources), self.row.copy()
        for number, source in enumerate(sources):
            if isinstance(source, LocalBatch):
                mine = self.part == number
                sources[number] = LocalBatch(source.columns(tensors, others).take(self.row[mine]))
                row[mine] = np.arange(mine.sum())
        return RowLocations(tuple(sources), self.part, row)


@dataclass(frozen=True)
class _Layout:
    """Locations of all columns of a batch."""

    num_rows: int
    tensors: Mapping[str, RowLocations]
    others: Mapping[str, RowLocations]
    facts: dict[str, Any]

    def has_columns(self) -> bool:
        """Columns, or rows that stay without them."""
        return bool(self.tensors or self.others or self.num_rows)

    def by_location(self) -> list[tuple[RowLocations, list[str], list[str]]]:
        """The tensor columns and other columns that lie together."""
        distinct = {id(places): places for places in (*self.tensors.values(), *self.others.values())}
        return [
            (
                shared,
                [name for name, places in self.tensors.items() if places is shared],
                [name for name, places in self.others.items() if places is shared],
            )
            for shared in distinct.values()
        ]

    def mapped(
        self, change: Callable[[RowLocations, list[str], list[str]], RowLocations], num_rows: int
    ) -> _Layout:
        """The table with other locations; columns that lie together still do."""
        new = {id(places): change(places, *names) for places, *names in self.by_location()}
        tensors = {name: new[id(places)] for name, places in self.tensors.items()}
        others = {name: new[id(places)] for name, places in self.others.items()}
        return _Layout(num_rows, tensors, others, self.facts)


class DataProtoFuture(DataProto):
    """A batch that workers hold. What is done to it moves no row before `get`; it is not changed in place.

    It travels to other processes when its sources do.
    """

    def __init__(self, sources: Sequence[Source], partition: Partition | None = None) -> None:
        """The rows of all sources, one after another, or in the order of the rows that they were computed from.
        Nothing is waited for.

        Args:
            sources: with the same columns; one without rows may lack them.
            partition: the batch whose parts the sources were computed from.

        Raises:
            ValueError: there is no source.
        """
        if not sources:
            raise ValueError("a DataProtoFuture needs at least one source; a group has at least one worker")
        self._sources, self._partition = tuple(sources), partition

    @classmethod
    def _at(cls, table: _Layout) -> DataProtoFuture:
        future = cls.__new__(cls)
        future._table = table
        return future

    @classmethod
    def from_local(cls, data: DataProto) -> DataProtoFuture:
        """A batch of this process as one that is elsewhere."""
        if isinstance(data, cls):
            return data
        places = RowLocations.of([LocalBatch(data)], [len(data)])
        return cls._at(
            _Layout(
                len(data),
                dict.fromkeys(data.tensors(), places),
                dict.fromkeys(data.non_tensor_batch, places),
                data.meta_info,
            )
        )

    @cached_property
    def _table(self) -> _Layout:
        """Waits until all is computed; an error of a computation is raised here."""
        contents_of_sources = [source.contents() for source in self._sources]
        facts = joined_meta_info([contents.facts for contents in contents_of_sources])
        filled = [number for number, contents in enumerate(contents_of_sources) if contents.num_rows]
        filled = filled or [
            int(np.argmax([len(contents.tensors) + len(contents.others) for contents in contents_of_sources]))
        ]
        lengths = [contents_of_sources[number].num_rows for number in filled]
        names = [
            (contents_of_sources[number].tensors, contents_of_sources[number].others) for number in filled
        ]
        check_same_columns(names)
        places = RowLocations.of([self._sources[number] for number in filled], lengths)
        order = None
        if self._partition is not None:
            order = self._partition.order_of_results([contents.num_rows for contents in contents_of_sources])
        if order is not None:
            places = RowLocations(places.sources, places.part[order], places.row[order])
        (tensors, others), *_ = names
        return _Layout(sum(lengths), dict.fromkeys(tensors, places), dict.fromkeys(others, places), facts)

    # ---------------------------------------------------------------- look

    def __len__(self) -> int:
        return self._table.num_rows

    def __repr__(self) -> str:
        if "_table" not in vars(self):
            return f"DataProtoFuture(? rows of {len(self._sources)} sources)"
        return f"DataProtoFuture({len(self)} rows; {', '.join([*self._table.tensors, *self._table.others])})"

    @property
    def batch(self) -> TensorDict | None:  # type: ignore[override]
        """The tensor columns, which are fetched."""
        return self.get().batch

    @property
    def non_tensor_batch(self) -> dict[str, NDArray[Any]]:  # type: ignore[override]
        """The other columns, which are fetched."""
        return self.select([]).get().non_tensor_batch

    @property
    def meta_info(self) -> dict[str, Any]:  # type: ignore[override]
        """The facts, which are here."""
        return self._table.facts

    def wait(self) -> Self:
        """Return when all rows are computed; an error of a computation is raised here. Nothing is moved."""
        _ = self._table
        return self

    def get(self) -> DataProto:
        """Fetch the rows, of each source once and with the columns that are wanted of it."""
        columns_of_source: dict[int, tuple[Source, set[str], set[str]]] = {}
        for places, tensors, others in self._table.by_location():
            for source in places.sources:
                _, all_tensors, all_others = columns_of_source.setdefault(id(source), (source, set(), set()))
                all_tensors.update(tensors)
                all_others.update(others)
        fetched = {
            number: source.columns(sorted(tensors), sorted(others))
            for number, (source, tensors, others) in columns_of_source.items()
        }
        data = DataProto(meta_info=dict(self._table.facts))
        if len(self):  # the rows stay where no column does
            data.batch = TensorDict({}, batch_size=[len(self)])
        for places, tensors, others in self._table.by_location():
            parts = [fetched[id(source)].select(tensors, others, []) for source in places.sources]
            data = data.union(places.rows_of(parts))
        return data.select(list(self._table.tensors), list(self._table.others))

    # ---------------------------------------------------------------- choose

    def take(self, rows: RowNumbers) -> DataProtoFuture:
        """The named rows in the given order (repeats allowed), or those where a mask is true."""
        index = row_numbers(rows, len(self))
        return self._at(self._table.mapped(lambda places, *names: places.take(index), len(index)))

    def select_idxs(self, idxs: RowNumbers) -> DataProtoFuture:
        """The same."""
        return self.take(idxs)

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> DataProtoFuture:
        """The rows of a Python slice."""
        return self.take(np.arange(len(self))[start:end:step])

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProtoFuture:
        """The chosen columns and facts; a list that is left out means all of that kind. `get` gives copies anyway."""
        table = self._table
        return self._at(
            _Layout(
                table.num_rows,
                chosen(table.tensors, batch_keys, "batch"),
                chosen(table.others, non_tensor_batch_keys, "non_tensor_batch"),
                chosen(table.facts, meta_info_keys, "meta_info"),
            )
        )

    # ---------------------------------------------------------------- join

    def union(self, other: DataProto) -> DataProtoFuture:
        """The columns and facts of both. Columns in both must mean the same: where they lie at different places, they
        are fetched and compared."""
        left, right = self._table, self.from_local(other)._table
        if left.num_rows != right.num_rows and (left.has_columns() and right.has_columns()):
            raise BatchError(f"a union needs equal rows, got {left.num_rows} and {right.num_rows}")
        tensors, others = (
            [name for name, places in ours.items() if name in theirs and theirs[name] is not places]
            for ours, theirs in ((left.tensors, right.tensors), (left.others, right.others))
        )
        if tensors or others:
            shared = self.select(tensors, others, []).get()
            shared.union(self._at(right).select(tensors, others, []).get())
        return self._at(
            _Layout(
                max(left.num_rows, right.num_rows),
                {**left.tensors, **right.tensors, **left.tensors},
                {**left.others, **right.others, **left.others},
                merged_meta_info(left.facts, right.facts),
            )
        )

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProtoFuture:
        """The rows of all, one after another, with the rules of `DataProto.concat`."""
        if not data:
            raise BatchError("there is nothing to concat; pass at least one batch")
        tables = [DataProtoFuture.from_local(part)._table for part in data]
        facts = joined_meta_info([table.facts for table in tables])
        filled = [table for table in tables if table.num_rows]
        filled = filled or [max(tables, key=lambda table: len(table.tensors) + len(table.others))]
        check_same_columns([(table.tensors, table.others) for table in filled])
        joined: dict[tuple[int, ...], RowLocations] = {}

        def together(parts: list[RowLocations]) -> RowLocations:
            return joined.setdefault(tuple(map(id, parts)), RowLocations.concat(parts))

        return DataProtoFuture._at(
            _Layout(
                sum(table.num_rows for table in filled),
                {name: together([table.tensors[name] for table in filled]) for name in filled[0].tensors},
                {name: together([table.others[name] for table in filled]) for name in filled[0].others},
                facts,
            )
        )

    # ---------------------------------------------------------------- travel

    def to_send(self) -> _Layout:
        """Layout to send to another process: of local sources, only the wanted columns and rows."""
        return self._table.mapped(RowLocations.to_send, len(self))

    def local_batches(self) -> list[DataProto]:
        """Local batches that are sent with it, beside references."""
        sources = {
            id(source): source for places, *_ in self.to_send().by_location() for source in places.sources
        }
        return [source.data for source in sources.values() if isinstance(source, LocalBatch)]

    def __reduce__(self) -> tuple[Any, ...]:
        return DataProtoFuture._at, (self.to_send(),)
