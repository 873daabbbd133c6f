from __future__ import annotations

import copy
import pickle
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from batch_models import MODEL, Row, batch_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from strop.protocol import (
    BatchError,
    DataProto,
    fold_batch_dim,
    jagged,
    pad_dataproto_to_divisor,
    rows,
    unfold_batch_dim,
    unpad_dataproto,
)


def model_of(data: DataProto) -> list[Row]:
    tensors = data.tensors()
    ids = [row.tolist() for row in rows(tensors["responses"])]
    return list(zip(ids, tensors["pair"].tolist(), data.non_tensor_batch["answer"].tolist(), strict=True))


def small() -> DataProto:
    return batch_of([([1], [0.0, 1.0], "a"), ([2, 3], [2.0, 3.0], "b"), ([], [4.0, 5.0], "c")])


# ---- rows


@settings(max_examples=40, deadline=None)
@given(model=MODEL, chunks=st.integers(1, 12))
def test_chunks_are_near_equal_and_joined_give_the_batch(model: list[Row], chunks: int) -> None:
    parts = batch_of(model).chunk(chunks)
    sizes = [len(part) for part in parts]
    assert len(sizes) == chunks
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert model_of(DataProto.concat(parts)) == model


@settings(max_examples=30, deadline=None)
@given(model=MODEL, size=st.integers(1, 10))
def test_split_pieces_joined_give_the_batch(model: list[Row], size: int) -> None:
    parts = batch_of(model).split(size)
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert model_of(DataProto.concat(parts)) == model


@settings(max_examples=40, deadline=None)
@given(model=MODEL, data=st.data())
def test_rows_arrive_in_the_order_of_the_index(model: list[Row], data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(-len(model), len(model) - 1), max_size=12))
    expected = [model[number] for number in numbers]
    batch = batch_of(model)
    assert model_of(batch[numbers]) == expected
    assert model_of(batch[np.array(numbers, dtype=np.int64)]) == expected
    assert model_of(batch[torch.tensor(numbers, dtype=torch.int64)]) == expected


@settings(max_examples=30, deadline=None)
@given(model=MODEL, data=st.data())
def test_a_permutation_is_undone_by_its_inverse(model: list[Row], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(model))))
    batch = batch_of(model)
    batch.reorder(order)
    assert model_of(batch) == [model[number] for number in order]
    batch.reorder(np.argsort(order))
    assert model_of(batch) == model


@settings(max_examples=30, deadline=None)
@given(model=MODEL, data=st.data())
def test_masks_and_slices_choose_as_python_lists_do(model: list[Row], data: st.DataObject) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(model), max_size=len(model)))
    batch = batch_of(model)
    kept = [row for row, keep in zip(model, mask, strict=True) if keep]
    assert model_of(batch[mask]) == kept
    assert model_of(batch[torch.tensor(mask)]) == kept
    bound = st.none() | st.integers(-10, 10)
    cut = slice(data.draw(bound), data.draw(bound), data.draw(st.sampled_from([None, 1, 2, -1])))
    assert model_of(batch[cut]) == model[cut]


@settings(max_examples=20, deadline=None)
@given(model=MODEL, times=st.integers(1, 3))
def test_repeat_interleaves_or_tiles(model: list[Row], times: int) -> None:
    batch = batch_of(model)
    assert model_of(batch.repeat(times)) == [row for row in model for _ in range(times)]
    assert model_of(batch.repeat(times, interleave=False)) == model * times


def test_each_row_repeats_as_often_as_its_count() -> None:
    expected = [row[2] for row in model_of(small().sample_level_repeat([2, 0, 1]))]
    assert expected == ["a", "a", "c"]
    for counts in (torch.tensor([2, 0, 1]), np.array([2, 0, 1]), (2, 0, 1)):
        assert [row[2] for row in model_of(small().sample_level_repeat(counts))] == expected  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="needs 3 counts"):
        small().sample_level_repeat([1, 2])
    with pytest.raises(TypeError, match="one count per row, got int"):
        small().sample_level_repeat(2)  # type: ignore[arg-type]


def test_one_row_is_an_item_with_plain_values() -> None:
    batch = small()
    item = batch[-2]
    assert item.batch is not None
    assert item.batch["responses"].tolist() == [2, 3]
    assert item.batch["pair"].tolist() == [2.0, 3.0]
    assert item.non_tensor_batch == {"answer": "b"}
    assert item.meta_info is batch.meta_info
    with pytest.raises(IndexError, match="row 3 does not exist in a batch of 3 rows"):
        batch[3]


def test_rows_that_do_not_exist_are_refused() -> None:
    with pytest.raises(IndexError, match="rows 0 to 3 were asked of a batch that has 3 rows"):
        small()[[0, 3]]
    with pytest.raises(BatchError, match="3 rows, 2 bools"):
        small()[[True, False]]
    with pytest.raises(BatchError, match="integers or bools, got float64"):
        small()[[0.5]]  # type: ignore[list-item]
    with pytest.raises(TypeError, match="got str"):
        small()["responses"]  # type: ignore[call-overload]


def test_an_empty_selection_keeps_its_columns_and_joins() -> None:
    nothing = small()[[]]
    assert len(nothing) == 0
    assert set(nothing.tensors()) == {"responses", "pair"}
    assert model_of(DataProto.concat([nothing, small()])) == model_of(small())
    assert len(DataProto.concat([nothing, nothing])) == 0


def test_meta_info_is_shared_by_views_of_the_rows() -> None:
    batch = small()
    views = [batch[0:1], batch[[0]], batch.chunk(2)[1], batch.repeat(2), batch.select()]
    assert all(view.meta_info is batch.meta_info for view in views)


def test_equal_chunks_are_refused_where_they_do_not_exist() -> None:
    with pytest.raises(BatchError, match="3 rows do not make 2 equal chunks"):
        small().chunk(2, equal=True)
    assert [len(part) for part in small().chunk(3, equal=True)] == [1, 1, 1]
    with pytest.raises(BatchError, match="at least 1 chunk, got 0"):
        small().chunk(0)
    with pytest.raises(BatchError, match="at least 1 row, got 0"):
        small().split(0)


def test_mini_batches_cover_each_epoch_once_in_an_order_of_seed_and_epoch() -> None:
    model: list[Row] = [([number], [0.0, 0.0], number) for number in range(7)]
    batch = batch_of(model)

    def order(seed: int | None, shuffle: bool) -> list[list[int]]:
        pieces = batch.make_iterator(3, epochs=2, seed=seed, dataloader_kwargs={"shuffle": shuffle})
        return [piece.non_tensor_batch["answer"].tolist() for piece in pieces]

    assert order(None, False) == [[0, 1, 2], [3, 4, 5], [6]] * 2
    shuffled = order(5, True)
    assert shuffled == order(5, True) != order(6, True)
    for epoch in (shuffled[:3], shuffled[3:]):
        assert sorted(chain.from_iterable(epoch)) == list(range(7))
    assert shuffled[:3] != shuffled[3:]
    assert next(batch.make_iterator(3, epochs=1)).meta_info == {"temperature": 0.7}


def test_mini_batch_options_that_do_nothing_are_refused() -> None:
    with pytest.raises(BatchError, match="need a seed"):
        small().make_iterator(2, 1, dataloader_kwargs={"shuffle": True})
    with pytest.raises(BatchError, match="'shuffle' only, got num_workers"):
        small().make_iterator(2, 1, dataloader_kwargs={"num_workers": 2})
    with pytest.raises(BatchError, match="size 0"):
        small().make_iterator(0, 1)


# ---- columns


def test_lists_of_equal_length_stay_objects() -> None:
    batch = DataProto.from_dict(non_tensors={"x": [[1, 2], [3, 4]]})
    assert batch.non_tensor_batch["x"].shape == (2,)
    assert batch.non_tensor_batch["x"][1] == [3, 4]
    assert len(batch) == 2
    assert len(DataProto()) == 0


def test_columns_of_differing_lengths_are_both_named() -> None:
    with pytest.raises(BatchError, match="'b' has 2 rows, but column 'a' has 3"):
        DataProto.from_dict({"a": torch.zeros(3), "b": torch.zeros(2)})
    with pytest.raises(AssertionError, match="'uid' has 2 rows, but column 'a' has 3"):
        DataProto.from_dict({"a": torch.zeros(3)}, {"uid": ["x", "y"]})
    with pytest.raises(ValueError, match="'v' has 1 rows, but column 'u' has 2"):
        DataProto.from_dict(non_tensors={"u": [1, 2], "v": [1]})
    with pytest.raises(BatchError, match="'a' is a single number"):
        DataProto.from_dict({"a": torch.tensor(1.0)})


def test_a_batch_has_one_leading_dimension() -> None:
    with pytest.raises(AssertionError, match="num_batch_dims=2"):
        DataProto.from_dict({"a": torch.zeros(2, 3)}, num_batch_dims=2)
    with pytest.raises(BatchError, match=r"one leading dimension, got \[2, 3\]"):
        DataProto(TensorDict({"a": torch.zeros(2, 3)}, batch_size=[2, 3]))
    with pytest.raises(BatchError, match="'x' of non_tensor_batch is a list"):
        DataProto(non_tensor_batch={"x": [1]})  # type: ignore[dict-item]


def test_one_dictionary_is_split_by_type() -> None:
    batch = DataProto.from_single_dict({"a": torch.zeros(2), "n": np.array([1, 2], dtype=np.int32)})
    assert set(batch.tensors()) == {"a"}
    assert batch.non_tensor_batch["n"].dtype == np.int32
    with pytest.raises(ValueError, match="'c' is a list; columns are torch tensors or numpy arrays"):
        DataProto.from_single_dict({"c": [1]})  # type: ignore[dict-item]


def test_select_gives_views_of_the_chosen_columns() -> None:
    batch = small()
    chosen = batch.select(batch_keys=["pair"], non_tensor_batch_keys=[], meta_info_keys=[])
    assert set(chosen.tensors()) == {"pair"}
    assert not chosen.non_tensor_batch
    assert not chosen.meta_info
    assert chosen.tensors()["pair"].data_ptr() == batch.tensors()["pair"].data_ptr()
    own = batch.select(deepcopy=True)
    assert own.tensors()["pair"].data_ptr() != batch.tensors()["pair"].data_ptr()
    own.meta_info["temperature"] = 1.0
    assert batch.meta_info == {"temperature": 0.7}
    assert model_of(own) == model_of(batch)
    with pytest.raises(BatchError, match="batch has no 'advantages'; it has pair, responses"):
        batch.select(batch_keys=["advantages"])


def test_changing_the_columns_of_a_selection_leaves_the_batch() -> None:
    batch = small()
    view = batch.select()
    assert view.batch is not None
    view.batch["new"] = torch.zeros(3)
    view.rename("pair", "couple")
    view.pop(non_tensor_batch_keys=["answer"])
    assert set(batch.tensors()) == {"responses", "pair"}
    assert set(batch.non_tensor_batch) == {"answer"}


def test_rows_stay_where_the_last_column_is_popped() -> None:
    data = DataProto.from_dict({}, non_tensors={"a": np.array([1, 2, 3], dtype=object)})
    popped = data.pop(non_tensor_batch_keys=["a"])
    assert (len(data), len(popped)) == (3, 3)
    assert len(data.union(popped)) == 3


def test_pop_moves_columns_out_of_the_batch() -> None:
    batch = small()
    popped = batch.pop(["responses"], ["answer"], ["temperature"])
    assert set(batch.tensors()) == {"pair"}
    assert not batch.non_tensor_batch
    assert not batch.meta_info
    assert set(popped.tensors()) == {"responses"}
    assert popped.meta_info == {"temperature": 0.7}
    batch.pop(["pair"])
    assert len(batch) == 3
    with pytest.raises(BatchError, match="batch has no 'pair'; it has nothing"):
        batch.pop(["pair"])


def test_rename_changes_tensor_names_in_place() -> None:
    batch = small()
    assert batch.rename(["pair", "responses"], ["responses", "ids"]) is batch
    assert batch.tensors()["responses"].shape == (3, 2)
    assert len(rows(batch.tensors()["ids"])[1]) == 2
    with pytest.raises(BatchError, match="two columns one name"):
        batch.rename("ids", "responses")
    with pytest.raises(BatchError, match="1 columns cannot take 2 names"):
        batch.rename("ids", ["a", "b"])


def test_unfolded_columns_become_rows_and_others_repeat() -> None:
    wide = torch.arange(12).view(2, 6)
    tokens = jagged([torch.tensor([1, 2]), torch.tensor([3, 4, 5, 6])])
    array = np.arange(8).reshape(2, 4)
    batch = DataProto.from_dict({"wide": wide, "tokens": tokens}, {"array": array, "uid": ["x", "y"]})
    cut = batch.unfold_column_chunks(2, ["wide", "tokens", "array"])
    assert cut.tensors()["wide"].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert [row.tolist() for row in rows(cut.tensors()["tokens"])] == [[1], [2], [3, 4], [5, 6]]
    assert cut.non_tensor_batch["array"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cut.non_tensor_batch["uid"].tolist() == ["x", "x", "y", "y"]
    with pytest.raises(BatchError, match="'wide' has a row whose width 4 does not divide"):
        batch.unfold_column_chunks(4, ["wide"])
    with pytest.raises(BatchError, match="has no 'wdie'"):
        batch.unfold_column_chunks(2, ["wdie"])


# ---- union and concat


def test_union_has_the_columns_and_facts_of_both_and_changes_neither() -> None:
    # A30: the reference writes into its left operand.
    left = small()
    right = DataProto.from_dict({"rewards": torch.ones(3)}, {"uid": list("xyz")}, {"version": 2})
    both = left.union(right)
    assert set(both.tensors()) == {"responses", "pair", "rewards"}
    assert set(both.non_tensor_batch) == {"answer", "uid"}
    assert both.meta_info == {"temperature": 0.7, "version": 2}
    assert set(left.tensors()) == {"responses", "pair"}
    assert set(left.non_tensor_batch) == {"answer"}
    assert left.meta_info == {"temperature": 0.7}
    assert right.meta_info == {"version": 2}


def test_union_does_not_read_columns_that_are_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # A30: the reference compares every shared column by value, O(data) on each union.
    left = small()
    view = left.select()

    def refuse(*_: object) -> bool:
        raise RuntimeError("values were compared")

    monkeypatch.setattr(torch, "equal", refuse)
    assert model_of(left.union(view)) == model_of(left)
    assert len(left.union(left.select(["pair"], [])[:])) == 3
    other = left.select(deepcopy=True)
    with pytest.raises(RuntimeError, match="values were compared"):
        left.union(other)


def test_union_accepts_equal_copies_and_names_a_column_that_differs() -> None:
    left = DataProto.from_dict({"x": torch.tensor([1.0, float("nan")])}, {"o": [{"a": float("nan")}, [1]]})
    assert len(left.union(copy.deepcopy(left))) == 2
    with pytest.raises(ValueError, match="'x' is on both sides of a union with different values"):
        left.union(DataProto.from_dict({"x": torch.tensor([1.0, 2.0])}))
    with pytest.raises(BatchError, match="'o' is on both sides"):
        left.union(DataProto.from_dict(non_tensors={"o": [{"a": 1.0}, [1]]}))
    with pytest.raises(AssertionError, match="Conflicting values for meta_info key 'temperature'"):
        small().union(DataProto(meta_info={"temperature": 1.0}))
    with pytest.raises(BatchError, match="equal rows, got 3 and 2"):
        small().union(left)


def test_a_batch_of_facts_only_joins_any_batch() -> None:
    assert small().union(DataProto(meta_info={"version": 1})).meta_info == {"temperature": 0.7, "version": 1}
    assert len(DataProto(meta_info={"version": 1}).union(small())) == 3


def test_concat_gathers_metrics_and_keeps_common_facts() -> None:
    metrics: list[Any] = [{"loss": 1.0}, None, [{"loss": 2.0}, {"loss": 3.0, "kl": 0.5}]]
    parts = [DataProto.from_dict({"x": torch.zeros(1)}, None, {"metrics": m, "t": 1.0}) for m in metrics]
    parts.append(DataProto.from_dict({"x": torch.zeros(1)}, None, {"only_here": "yes"}))
    joined = DataProto.concat(parts)
    assert joined.meta_info == {
        "metrics": {"loss": [1.0, 2.0, 3.0], "kl": [0.5]},
        "t": 1.0,
        "only_here": "yes",
    }
    assert parts[0].meta_info == {"metrics": {"loss": 1.0}, "t": 1.0}


def test_concat_compares_facts_deeply_and_names_the_conflict() -> None:
    # A30: the reference asserts with ==, which arrays make ambiguous, NaN makes false, and -O removes.
    def part(fact: object) -> DataProto:
        return DataProto.from_dict({"x": torch.zeros(1)}, None, {"fact": fact})

    for make in (
        lambda: float("nan"),
        lambda: np.array([1, 2]),
        lambda: torch.ones(2),
        lambda: {"a": [np.array([float("nan")]), float("nan")]},
    ):
        assert len(DataProto.concat([part(make()), part(make())])) == 2
    with pytest.raises(AssertionError, match="values for meta_info key 'fact'.*1 before part 2, 5"):
        DataProto.concat([part(1), part(1), part(5)])
    with pytest.raises(BatchError, match="Conflicting values"):
        DataProto.concat([part(np.array([1, 2])), part(np.array([1, 3]))])


def test_concat_names_columns_that_some_parts_lack() -> None:
    x, y = torch.zeros(1), torch.zeros(1)
    with pytest.raises(BatchError, match=r"columns \['y'\] are in some parts of a concat only \(part 1"):
        DataProto.concat([DataProto.from_dict({"x": x}), DataProto.from_dict({"x": x, "y": y})])
    with pytest.raises(BatchError, match=r"columns \['x'\] are in some parts of a concat only"):
        DataProto.concat([DataProto.from_dict({"x": x}), DataProto.from_dict(non_tensors={"x": [1]})])
    with pytest.raises(BatchError, match="nothing to concat"):
        DataProto.concat([])
    empty = DataProto(meta_info={"metrics": {"loss": 1.0}})
    joined = DataProto.concat([empty, DataProto.from_dict({"x": x}, None, {"metrics": {"loss": 2.0}})])
    assert len(joined) == 1
    assert joined.meta_info["metrics"] == {"loss": [1.0, 2.0]}


# ---- padding, folding, conversion, transport


@settings(max_examples=20, deadline=None)
@given(model=MODEL, divisor=st.integers(1, 20))
def test_padding_to_a_divisor_repeats_from_the_front_and_comes_off(model: list[Row], divisor: int) -> None:
    batch = batch_of(model)
    padded, added = pad_dataproto_to_divisor(batch, divisor)
    assert len(padded) % divisor == 0
    assert 0 <= added < divisor
    assert model_of(padded) == [model[number % len(model)] for number in range(len(model) + added)]
    assert len(batch) == len(model)
    assert model_of(unpad_dataproto(padded, added)) == model
    assert unpad_dataproto(batch, 0) is batch


def test_padding_by_name_leaves_the_batch_as_it_is() -> None:
    # A38: the reference's padding grows the caller's object.
    batch = small()
    assert [row[2] for row in model_of(batch.padding(2, "last"))] == ["a", "b", "c", "c", "c"]
    assert [row[2] for row in model_of(batch.padding(1))] == ["a", "b", "c", "a"]
    assert len(batch) == 3
    with pytest.raises(BatchError, match="'first' or the 'last' row, got 'middle'"):
        batch.padding(1, "middle")  # type: ignore[arg-type]


def test_folding_regroups_rows_and_unfolding_is_its_inverse() -> None:
    batch = DataProto.from_dict({"x": torch.arange(12).view(6, 2)}, {"uid": list("abcdef")})
    folded = fold_batch_dim(batch, 3)
    assert folded.tensors()["x"].shape == (3, 2, 2)
    assert folded.non_tensor_batch["uid"].tolist() == [["a", "b"], ["c", "d"], ["e", "f"]]
    back = unfold_batch_dim(folded)
    assert back.tensors()["x"].tolist() == batch.tensors()["x"].tolist()
    assert back.non_tensor_batch["uid"].tolist() == list("abcdef")
    with pytest.raises(BatchError, match="6 rows do not fold into 4"):
        fold_batch_dim(batch, 4)
    with pytest.raises(BatchError, match="'responses' is jagged"):
        fold_batch_dim(small(), 3)


@settings(max_examples=20, deadline=None)
@given(model=MODEL)
def test_a_tensordict_carries_everything_there_and_back(model: list[Row]) -> None:
    back = DataProto.from_tensordict(batch_of(model).to_tensordict())
    assert model_of(back) == model
    assert back.meta_info == {"temperature": 0.7}


def test_a_name_on_two_sides_has_no_place_in_a_tensordict() -> None:
    batch = DataProto.from_dict({"x": torch.zeros(1)}, {"x": ["a"]})
    with pytest.raises(BatchError, match="'x' names two things"):
        batch.to_tensordict()
    nested = TensorDict({"a": TensorDict({"b": torch.zeros(2)}, batch_size=[2])}, batch_size=[2])
    with pytest.raises(BatchError, match="no nested TensorDict"):
        DataProto.from_tensordict(nested)


def test_a_chunk_travels_without_the_rows_it_was_cut_from() -> None:
    long = DataProto.from_dict(
        {"ids": jagged([torch.arange(1000) for _ in range(100)]), "dense": torch.zeros(100, 1000)},
        {"n": range(100)},
    )
    piece = long.chunk(50)[7]
    sent = pickle.dumps(piece)
    assert len(sent) < 2 * 1000 * (8 + 4) + 5000
    back = pickle.loads(sent)
    assert [row.tolist() for row in rows(back.tensors()["ids"])] == [list(range(1000))] * 2
    assert back.non_tensor_batch["n"].tolist() == [14, 15]


def test_to_a_device_gives_a_batch_there() -> None:
    moved = small().to("cpu")
    assert model_of(moved) == model_of(small())
    both = DataProto.from_dict({"a": moved.tensors()["responses"], "b": moved.tensors()["responses"] * 2})
    assert rows(both.to("cpu").tensors()["b"])[1].tolist() == [4, 6]


def test_a_batch_prints_its_columns_not_their_values() -> None:
    assert repr(small()) == (
        "DataProto(3 rows; responses int64[3, 0..2], pair float32[3, 2], answer object; "
        "meta_info ['temperature'])"
    )
