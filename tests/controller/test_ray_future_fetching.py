"""What a future fetches, and when: nothing before get(), then the sources with wanted rows, each once."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from strop.controller import Partition
from strop.controller.ray.future import BatchSummary, DataProtoFuture, LocalBatch
from strop.protocol import BatchError, DataProto, jagged


class Part:
    """A pending batch of another process: says what is asked of it."""

    def __init__(self, name: str, data: DataProto, log: list[str]) -> None:
        self.name, self.data, self.log = name, data, log

    def contents(self) -> BatchSummary:
        self.log.append(f"{self.name} computed")
        return BatchSummary.of(self.data)

    def columns(self, batch_keys: Sequence[str], non_tensor_batch_keys: Sequence[str]) -> DataProto:
        self.log.append(f"{self.name}: {' '.join([*batch_keys, *non_tensor_batch_keys])}")
        return self.data.select(batch_keys, non_tensor_batch_keys)


class Lost:
    """A pending batch that was not computed."""

    def contents(self) -> BatchSummary:
        raise RuntimeError("worker 1 died")

    columns: Any = contents


class Unready:
    """A pending batch that nobody may wait for yet."""

    def contents(self) -> BatchSummary:
        raise AssertionError("waited for")

    columns: Any = contents


def numbered(start: int, stop: int, name: str = "n") -> DataProto:
    values = [torch.full((number % 3,), number) for number in range(start, stop)]
    column = jagged(values or [torch.zeros(0, dtype=torch.int64)])
    return DataProto.from_dict(
        {name: torch.arange(start, max(stop, start + 1)), f"{name}_ids": column}
    ).slice(0, stop - start)


def parts(sizes: Sequence[int], log: list[str], name: str = "n") -> DataProtoFuture:
    bounds = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    return DataProtoFuture(
        [
            Part(f"{name}{number}", numbered(bounds[number], bounds[number + 1], name), log)
            for number in range(len(sizes))
        ]
    )


def numbers(future: DataProtoFuture, name: str = "n") -> list[int]:
    return list(future.get().tensors()[name].tolist())


def test_nothing_is_fetched_before_get() -> None:
    log: list[str] = []
    future = parts([3, 0, 2], log).union(parts([4, 1], log, "m"))
    assert len(future) == 5
    assert future.wait() is future
    shuffled = future.take([4, 0, 2, 2])
    pieces = [*future.chunk(2), *shuffled.split(3), future.slice(1, 3).select(["n"])]
    joined = DataProtoFuture.concat(
        [*pieces[:2], pieces[2].union(numbered(0, 3, "k")).select(["n", "n_ids", "m", "m_ids"])]
    )
    pickle.loads(pickle.dumps(joined))
    assert len(joined) == 8
    assert {entry.split()[1] for entry in log} == {"computed"}


def test_a_chunk_fetches_the_parts_that_hold_its_rows_each_once() -> None:
    # A39: in the reference every receiver fetches all parts.
    log: list[str] = []
    chunks = parts([3, 0, 2, 5], log).chunk(4)  # rows 0-2, 3-5, 6-7, 8-9
    fetched = []
    for chunk, expected in zip(chunks, ([0, 1, 2], [3, 4, 5], [6, 7], [8, 9]), strict=True):
        log.clear()
        assert numbers(chunk) == expected
        fetched.append(log.copy())
    assert fetched == [["n0: n n_ids"], ["n2: n n_ids", "n3: n n_ids"], ["n3: n n_ids"], ["n3: n n_ids"]]


def test_shuffled_and_repeated_rows_fetch_each_part_once() -> None:
    log: list[str] = []
    future = parts([3, 3, 3], log).take([8, 0, 7, 1, 8, 0])
    again = DataProtoFuture.concat([future.take([4, 1]), future.take([0]), future.take([1, 0])])
    log.clear()
    assert numbers(future) == [8, 0, 7, 1, 8, 0]
    assert sorted(log) == ["n0: n n_ids", "n2: n n_ids"]
    log.clear()
    assert numbers(again) == [8, 0, 8, 0, 8]
    assert sorted(log) == ["n0: n n_ids", "n2: n n_ids"]


def test_each_side_fetches_only_its_own_parts() -> None:
    log: list[str] = []
    future = parts([2, 2], log).union(parts([1, 3], log, "m"))
    both = future.chunk(2)[1].union(future.take([2, 3]).select(["n"]))
    log.clear()
    assert numbers(both) == [2, 3] == numbers(both, "m")
    assert log == ["n1: n n_ids", "m1: m m_ids"] * 2  # one get for each call of numbers


def test_no_rows_fetch_the_smallest_part_for_its_columns() -> None:
    log: list[str] = []
    future = parts([0, 5, 1, 4], log)
    empty = future.chunk(12)[11]
    log.clear()
    assert set(empty.get().tensors()) == {"n", "n_ids"}
    assert log == ["n2: n n_ids"]


def test_futures_are_made_without_waiting() -> None:
    assert isinstance(DataProtoFuture([Unready()]), DataProto)
    future = DataProtoFuture([Unready(), Unready()], Partition(numbered(0, 2), [[1], [0]]))
    with pytest.raises(AssertionError, match="waited for"):
        len(future)


def test_single_columns_move_alone() -> None:
    log: list[str] = []
    future = parts([2, 2], log).union(parts([4], log, "m"))
    narrow = future.select(["n"], []).take([3, 0])
    log.clear()
    assert numbers(narrow) == [3, 0]
    assert log == ["n0: n", "n1: n"]
    three = future.take([3])
    log.clear()
    wide = three.union(three.select(["n"]))
    assert log == []  # it is the same column
    assert set(wide.get().tensors()) == {"n", "n_ids", "m", "m_ids"}
    assert log == ["n1: n n_ids", "m0: m m_ids"]


def test_columns_that_were_not_selected_stay_out_of_a_union() -> None:
    log: list[str] = []
    narrow = parts([2, 1], log).select(["n"])
    assert set(narrow.union(parts([3], log, "m")).get().tensors()) == {"n", "m", "m_ids"}
    united = parts([3], log, "m").union(narrow).take([2, 0])
    assert set(united.get().tensors()) == {"n", "m", "m_ids"}
    assert numbers(united) == [2, 0]
    stacked = DataProtoFuture.concat([narrow, narrow.slice(0, 1)])
    assert set(stacked.get().tensors()) == {"n"}


def test_rows_that_do_not_fit_are_found_before_any_is_moved() -> None:
    log: list[str] = []
    with pytest.raises(BatchError, match="a union needs equal rows, got 3 and 4"):
        parts([2, 1], log).union(parts([4], log, "m"))
    assert not any(entry.endswith("ids") for entry in log)


def test_an_error_of_a_computation_comes_up_in_every_wait() -> None:
    future = DataProtoFuture([LocalBatch(numbered(0, 2)), Lost()])
    for wait in (future.wait, future.get, future.__len__, lambda: future.chunk(2)):
        with pytest.raises(RuntimeError, match="worker 1 died"):
            wait()


def test_only_wanted_rows_of_a_batch_at_hand_travel() -> None:
    wide = DataProto.from_dict({"x": torch.zeros(1000, 100), "y": torch.arange(1000)})
    whole = len(pickle.dumps(DataProtoFuture.from_local(wide)))
    assert whole > 400_000
    chunk = pickle.dumps(DataProtoFuture.from_local(wide).chunk(100)[3])
    assert len(chunk) < whole / 50
    assert pickle.loads(chunk).get().tensors()["y"].tolist() == list(range(30, 40))
    column = pickle.dumps(DataProtoFuture.from_local(wide).union(numbered(0, 1000)).select(["y", "n"]))
    assert len(column) < whole / 10
    assert pickle.loads(column).get().tensors()["y"].tolist() == list(range(1000))


def test_a_chunk_names_no_part_without_its_rows() -> None:
    log: list[str] = []
    future = DataProtoFuture.concat([parts([100] * 30, log), numbered(0, 10)]).take(range(3000))
    (first, *_), whole = future.chunk(30), pickle.dumps(future)
    assert len(pickle.dumps(first)) < len(whole) / 20
