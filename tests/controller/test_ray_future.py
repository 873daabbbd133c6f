"""A future gives what the same operations give on the batch itself."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from batch_models import MODEL, Row, batch_of
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.controller import Partition
from strop.controller.ray.future import DataProtoFuture, LocalBatch
from strop.protocol import BatchError, DataProto, is_jagged, jagged, rows


def small() -> DataProto:
    return batch_of([([1], [0.0, 1.0], "a"), ([2, 3], [2.0, 3.0], "b"), ([], [4.0, 5.0], "c")])


def content(data: DataProto) -> dict[str, Any]:
    """Everything in a batch as plain data: columns with type and layout, and facts."""
    found: dict[str, Any] = {"facts": data.meta_info, "rows": len(data)}
    for name, column in data.tensors().items():
        found[name] = (str(column.dtype), is_jagged(column), [row.tolist() for row in rows(column)])
    for name, array in data.non_tensor_batch.items():
        found[name] = (str(array.dtype), array.tolist())
    return found


def answers(data: DataProto) -> list[Any]:
    return list(data.get().non_tensor_batch["answer"].tolist())


def with_empty_parts(batch: DataProto, draw: Any) -> DataProtoFuture:
    """The batch in parts of drawn sizes; a part without rows may lack some columns, or all."""
    cuts = sorted(draw(st.lists(st.integers(0, len(batch)), max_size=4)))
    parts = []
    for start, stop in zip([0, *cuts], [*cuts, len(batch)], strict=True):
        part = batch.slice(start, stop)
        if start == stop:
            fewer = part.select(list(part.tensors())[:1], [])
            part = draw(st.sampled_from([part, fewer, DataProto()]))
        parts.append(LocalBatch(part))
    return DataProtoFuture(parts)


def number_column(name: str, length: int) -> DataProto:
    """A jagged column that tells its rows apart, with a fact of its own."""
    values = [torch.arange(number % 3, dtype=torch.float32) + number for number in range(length)]
    empty = DataProto.from_dict({name: jagged([torch.zeros(0)])}, meta_info={name: 1})
    return DataProto.from_dict({name: jagged(values)}, meta_info={name: 1}) if length else empty.slice(0, 0)


class Both:
    """A batch and a future that went through the same operations."""

    def __init__(self, data: DataProto, future: DataProto) -> None:
        self.data, self.future, self.unions = data, future, 0

    def apply(self, name: str, draw: Any) -> None:
        getattr(self, f"_{name}")(draw)

    def _take(self, draw: Any) -> None:
        length = len(self.data)
        numbers = draw(st.lists(st.integers(-length, length - 1), max_size=8)) if length else []
        self.data, self.future = self.data.select_idxs(numbers), self.future.take(numbers)

    def _slice(self, draw: Any) -> None:
        start, stop = draw(st.integers(-9, 9)), draw(st.none() | st.integers(-9, 9))
        self.data, self.future = self.data.slice(start, stop), self.future.slice(start, stop)

    def _chunk(self, draw: Any) -> None:
        count = draw(st.integers(1, 5))
        self._one_of(self.data.chunk(count), self.future.chunk(count), draw)

    def _split(self, draw: Any) -> None:
        size = draw(st.integers(1, 5))
        self._one_of(self.data.split(size), self.future.split(size), draw)

    def _one_of(self, data: list[DataProto], futures: list[DataProto], draw: Any) -> None:
        assert [len(future) for future in futures] == [len(part) for part in data]
        if data:
            chosen = draw(st.integers(0, len(data) - 1))
            self.data, self.future = data[chosen], futures[chosen]

    def _concat(self, draw: Any) -> None:
        count = draw(st.integers(1, 3))
        order = draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4))
        data, futures = self.data.chunk(count), self.future.chunk(count)
        self.data = DataProto.concat([data[number] for number in order])
        self.future = DataProtoFuture.concat([futures[number] for number in order])

    def _union(self, draw: Any) -> None:
        self.unions += 1
        added = number_column(f"added_{self.unions}", len(self.data))
        pieces = added.chunk(draw(st.integers(1, 3)))
        other = DataProtoFuture([LocalBatch(piece) for piece in pieces])
        self.data = self.data.union(added)
        self.future = self.future.union(draw(st.sampled_from([other, added])))

    def _union_with_own_columns(self, draw: Any) -> None:
        self.data, self.future = self.data.union(self.data), self.future.union(self.future)

    def _select(self, draw: Any) -> None:
        names = list(self.data.tensors())
        tensors = draw(st.none() | st.lists(st.sampled_from(names), unique=True)) if names else None
        others = draw(st.sampled_from([None, [*self.data.non_tensor_batch], []]))
        self.data = self.data.select(tensors, others)
        self.future = self.future.select(tensors, others)

    def _travel(self, draw: Any) -> None:
        packed = draw(st.sampled_from([pickle, cloudpickle])).dumps(self.future)
        self.future = pickle.loads(packed)


OPERATIONS = [
    "take", "slice", "chunk", "split", "concat", "union", "union_with_own_columns", "select", "travel",
]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(model=MODEL, has_tensors=st.booleans(), data=st.data())
def test_any_operations_on_a_future_give_what_they_give_on_its_batch(
    model: list[Row], has_tensors: bool, data: Any
) -> None:
    batch = batch_of(model)
    batch.non_tensor_batch["number"] = np.arange(len(model))  # tells rows of equal content apart
    if not has_tensors:
        batch = DataProto(non_tensor_batch=batch.non_tensor_batch, meta_info=batch.meta_info)
    both = Both(batch, with_empty_parts(batch, data.draw))
    for operation in data.draw(st.lists(st.sampled_from(OPERATIONS), max_size=6)):
        both.apply(operation, data.draw)
        assert len(both.future) == len(both.data)
    assert content(both.future.get()) == content(both.data)


@settings(max_examples=30, deadline=None)
@given(model=MODEL, held=st.integers(1, 4), chunks=st.integers(1, 12))
def test_a_future_joins_and_cuts_like_its_batch(model: list[Row], held: int, chunks: int) -> None:
    batch = batch_of(model)
    future = DataProtoFuture([LocalBatch(part) for part in batch.chunk(held)])
    assert content(future.get()) == content(batch)
    got = [content(piece.get()) for piece in future.chunk(chunks)]
    assert got == [content(piece) for piece in batch.chunk(chunks)]


@settings(max_examples=30, deadline=None)
@given(model=MODEL, data=st.data())
def test_rows_computed_in_parts_come_back_in_the_callers_order(model: list[Row], data: Any) -> None:
    batch = batch_of(model)
    numbers = data.draw(st.permutations(range(len(model))))
    at = data.draw(st.integers(0, len(model)))
    given = [numbers[:at], [], numbers[at:]]
    future = DataProtoFuture([LocalBatch(batch.select_idxs(part)) for part in given], Partition(batch, given))
    assert content(future.get()) == content(batch)
    assert answers(future.chunk(2)[1]) == answers(batch.chunk(2)[1])
    again = DataProtoFuture.concat([future, future.slice(0, 1)])
    assert answers(again) == answers(DataProto.concat([batch, batch.slice(0, 1)]))


def test_a_future_of_no_rows_has_all_columns() -> None:
    # The first part has neither rows nor columns, so the columns must come from another one.
    future = DataProtoFuture([LocalBatch(DataProto()), LocalBatch(small())])
    for empty in (future.take([]), future.slice(2, 2), future.chunk(9)[8]):
        assert len(empty) == 0
        assert content(empty.get()) == content(small().slice(0, 0))
    none = DataProtoFuture([LocalBatch(DataProto()), LocalBatch(small().slice(0, 0))])
    assert [content(piece.get()) for piece in none.chunk(2)] == [content(small().slice(0, 0))] * 2
    assert none.split(3) == []


def test_rows_are_chosen_from_chosen_rows() -> None:
    letters = DataProto.from_dict(non_tensors={"answer": list("abcdefgh")})
    future = DataProtoFuture.concat(DataProtoFuture.from_local(letters).chunk(3))  # abc, def, gh
    gaps = future.take([0, 2, 3, 5, 7])
    assert answers(gaps.take([1, 3])) == ["c", "f"]
    assert answers(gaps.take([4, 0]).take([1])) == ["a"]
    assert [answers(piece) for piece in gaps.slice(1, 4).split(2)] == [["c", "d"], ["f"]]
    assert answers(future.slice(2, 7).take([3, 0])) == ["f", "c"]
    assert answers(DataProtoFuture.from_local(letters).take([3, 3, 5])) == [
        "d",
        "d",
        "f",
    ]
    assert answers(DataProtoFuture.concat([gaps, gaps]).take([9, 1])) == ["h", "c"]


def test_rows_are_chosen_by_masks_and_arrays_too() -> None:
    future = DataProtoFuture.from_local(small())
    assert answers(future.take(np.array([True, False, True]))) == ["a", "c"]
    assert answers(future.take(torch.tensor([2, 0]))) == ["c", "a"] == answers(future.select_idxs([-1, 0]))
    with pytest.raises(IndexError, match="rows 3 to 3 were asked of a batch that has 3 rows"):
        future.take([3])
    with pytest.raises(BatchError, match="pieces of at least 1 row, got 0"):
        future.split(0)
    with pytest.raises(BatchError, match="at least 1 chunk, got 0"):
        future.chunk(0)


def test_what_get_returns_belongs_to_the_caller() -> None:
    batch = small()
    got = DataProtoFuture.from_local(batch).get()
    got.pop(["pair"])
    got.meta_info["temperature"] = 0.0
    assert set(batch.tensors()) == {"responses", "pair"}
    assert batch.meta_info == {"temperature": 0.7}
    assert (
        DataProtoFuture.from_local(DataProtoFuture.from_local(batch)).get().tensors()["pair"].data_ptr()
        == batch.tensors()["pair"].data_ptr()
    )


def test_a_future_prints_without_waiting() -> None:
    class Unready:
        contents: Any = None
        columns: Any = None

    assert repr(DataProtoFuture([Unready(), Unready()])) == "DataProtoFuture(? rows of 2 sources)"
    assert repr(DataProtoFuture.from_local(small())) == "DataProtoFuture(3 rows; responses, pair, answer)"


def test_whoever_looks_at_a_column_gets_it() -> None:
    future = DataProtoFuture.from_local(small())
    assert content(DataProto.concat([future, small()])) == content(DataProto.concat([small(), small()]))
    assert content(small().select(["pair"]).union(future.select(["responses"]))) == content(
        small().select(["pair", "responses"])
    )
    assert set(future.tensors()) == {"responses", "pair"}
    assert future.non_tensor_batch["answer"].tolist() == ["a", "b", "c"]
    assert future[1].non_tensor_batch["answer"] == "b"


# ---- facts


def with_metrics(number: float) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.tensor([number])}, meta_info={"version": 3, "metrics": {"loss": number}}
    )


def test_metrics_of_all_sources_and_sides_are_joined() -> None:
    future = DataProtoFuture([LocalBatch(with_metrics(1.0)), LocalBatch(with_metrics(2.0))])
    assert future.get().meta_info == {"version": 3, "metrics": {"loss": [1.0, 2.0]}}
    assert future.select(["x"]).get().meta_info == {"version": 3, "metrics": {"loss": [1.0, 2.0]}}
    # One source alone is joined too, so that a group of one worker gives what a group of two gives.
    one = DataProtoFuture([LocalBatch(with_metrics(2.0))])
    assert one.get().meta_info == {"version": 3, "metrics": {"loss": [2.0]}}
    facts = {"metrics": {"loss": 3.0, "kl": 0.5}}
    other = DataProtoFuture([LocalBatch(DataProto.from_dict({"y": torch.ones(2)}, meta_info=facts))])
    joined = {"version": 3, "metrics": {"loss": [[1.0, 2.0], [3.0]], "kl": [[0.5]]}}
    assert future.union(other).get().meta_info == joined
    assert future.get().union(other.get()).meta_info == joined
    assert future.select(meta_info_keys=["version"]).union(other).meta_info == {
        "version": 3,
        "metrics": {"loss": [3.0], "kl": [0.5]},
    }


def test_a_batch_at_hand_keeps_its_facts_as_they_are() -> None:
    joined = DataProto.concat([with_metrics(1.0), with_metrics(2.0)])
    for future in (
        DataProtoFuture.from_local(joined),
        DataProtoFuture.from_local(joined).chunk(2)[0],
        DataProtoFuture.from_local(joined).select(["x"]).take([1]),
    ):
        assert future.get().meta_info == {"version": 3, "metrics": {"loss": [1.0, 2.0]}}


def test_a_batch_without_columns_adds_its_facts() -> None:
    future = DataProtoFuture.from_local(small()).union(DataProto(meta_info={"step": 4}))
    assert future.get().meta_info == {"temperature": 0.7, "step": 4}
    halves = future.chunk(2)
    assert halves[1].get().meta_info == {"temperature": 0.7, "step": 4}
    assert DataProtoFuture.concat(halves).get().meta_info == {"temperature": 0.7, "step": 4}
    both = future.select(["pair"], []).union(DataProtoFuture.from_local(small()).select(["responses"], []))
    assert content(both.get()) == {
        **content(small().select(None, [])),
        "facts": {"temperature": 0.7, "step": 4},
    }
    assert DataProtoFuture.from_local(small()).union(future).get().meta_info == {
        "temperature": 0.7,
        "step": 4,
    }
    with pytest.raises(BatchError, match="Conflicting values for meta_info key 'step'"):
        future.union(DataProto(meta_info={"step": 5}))
    with pytest.raises(BatchError, match="Conflicting values for meta_info key 'temperature'"):
        future.union(DataProto(meta_info={"temperature": 1.0}))


@pytest.mark.parametrize("names", [["extra"], []])
def test_rows_stay_where_no_column_is_chosen(names: list[str]) -> None:
    # 3 rows without a tensor column; the tensor column `extra` comes by a union.
    plain, extra = small().select([], None), DataProto.from_dict({"extra": torch.arange(3.0)})
    untensored = DataProto(non_tensor_batch=plain.non_tensor_batch, meta_info=plain.meta_info)
    for data in (untensored, plain):
        both = DataProtoFuture.from_local(data).union(extra).select(names, [])
        expected = data.union(extra).select(names, [])
        assert (len(both), len(both.get()), len(expected)) == (3, 3, 3)
        again = both.union(DataProto.from_dict({"more": torch.ones(3)}))
        assert content(again.get()) == content(expected.union(DataProto.from_dict({"more": torch.ones(3)})))
        assert len(data.select([], [])) == len(DataProtoFuture.from_local(data).select([], [])) == 3


# ---- what cannot be


def test_sides_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BatchError, match="a union needs equal rows, got 3 and 2"):
        DataProtoFuture.from_local(small()).union(small().slice(0, 2))
    changed = small().select(["pair"], [])
    changed.tensors()["pair"][0, 0] = 9.0
    with pytest.raises(ValueError, match="column 'pair' is on both sides of a union with different values"):
        DataProtoFuture.from_local(small()).union(DataProto.from_dict({"pair": torch.zeros(3, 2)}))
    same = DataProtoFuture.from_local(small()).union(small().select(["pair"], []))
    assert content(same.get()) == content(small())


def test_columns_that_are_not_there_are_named() -> None:
    future = DataProtoFuture.from_local(small())
    with pytest.raises(BatchError, match="batch has no 'resposes'; it has pair, responses"):
        future.select(["resposes"])
    narrow = future.select(["pair"], [])
    with pytest.raises(BatchError, match="batch has no 'responses'; it has pair"):
        narrow.select(["responses"])
    with pytest.raises(BatchError, match="non_tensor_batch has no 'answer'; it has nothing"):
        narrow.select(None, ["answer"])
    assert content(narrow.get()) == content(small().select(["pair"], []))
    assert set(future.select(["pair"]).get().tensors()) == {"pair"}


def test_a_future_has_sources() -> None:
    with pytest.raises(ValueError, match="at least one source"):
        DataProtoFuture([])
    with pytest.raises(BatchError, match="nothing to concat"):
        DataProtoFuture.concat([])


def test_a_part_that_has_not_the_rows_it_was_given_cannot_be_put_in_order() -> None:
    future = DataProtoFuture(
        [LocalBatch(small()), LocalBatch(small().slice(0, 1))], Partition(small(), [[1, 0], [2]])
    )
    message = "part 0 of a result has 3 rows, but 2 rows were asked of it"
    with pytest.raises(BatchError, match=message):
        len(future)
    with pytest.raises(BatchError, match=message):
        future.get()
    facts = [LocalBatch(with_metrics(1.0).select([])), LocalBatch(DataProto(meta_info={"version": 3}))]
    only_facts = [LocalBatch(DataProto(meta_info=done.data.meta_info)) for done in facts]
    reported = DataProtoFuture(only_facts, Partition(small(), [[1, 0], [2]]))
    assert len(reported) == 0
    assert reported.get().meta_info == {"version": 3, "metrics": {"loss": [1.0]}}


def test_a_side_that_was_cut_down_needs_only_the_columns_it_was_asked_for() -> None:
    # The made side keeps one tensor and every other column, of which it has none: the names come from the first side.
    made = DataProtoFuture.from_local(
        DataProto.from_dict({"made": torch.arange(3.0), "spare": torch.zeros(3)})
    ).select(["made"])
    both = DataProtoFuture.from_local(small()).union(made).select(["made"], ["answer"]).get()
    assert set(both.tensors()) == {"made"}
    assert set(both.non_tensor_batch) == {"answer"}
    with pytest.raises(BatchError, match="non_tensor_batch has no 'answr'"):
        DataProtoFuture.from_local(small()).union(made).select(["made"], ["answr"])
