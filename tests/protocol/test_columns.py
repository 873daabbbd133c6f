from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.protocol import (
    BatchError,
    cat_columns,
    flat,
    from_flat,
    from_padded,
    is_jagged,
    jagged,
    jagged_like,
    row_lengths,
    rows,
    take_rows,
    to_padded,
)
from strop.protocol.columns import compact, same_column, slice_columns, take_columns

ROWS = st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=7)


def column_of(lists: list[list[int]]) -> Tensor:
    return jagged([torch.tensor(row, dtype=torch.int64) for row in lists])


def lists_of(column: Tensor) -> list[list[int]]:
    return [row.tolist() for row in rows(column)]


@settings(max_examples=40, deadline=None)
@given(lists=ROWS, data=st.data())
def test_rows_are_taken_in_the_order_of_the_index(lists: list[list[int]], data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=9))
    taken = take_rows(column_of(lists), torch.tensor(index, dtype=torch.int64))
    assert lists_of(taken) == [lists[number] for number in index]


@settings(max_examples=40, deadline=None)
@given(lists=ROWS, data=st.data())
def test_slices_hold_their_rows_and_share_memory(lists: list[list[int]], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(lists)))
    stop = data.draw(st.integers(start, len(lists)))
    column = column_of(lists)
    piece = slice_columns({"x": column}, start, stop)["x"]
    assert lists_of(piece) == lists[start:stop]
    assert piece.offsets()[0] == 0
    if flat(piece).numel():
        offset = sum(map(len, lists[:start]))
        assert flat(piece).data_ptr() == flat(column)[offset:].data_ptr()


@settings(max_examples=40, deadline=None)
@given(lists=ROWS, side=st.sampled_from(["left", "right"]))
def test_padding_fills_one_side_and_is_undone_by_its_mask(lists: list[list[int]], side: str) -> None:
    padded = to_padded(column_of(lists), 77, side=side)  # type: ignore[arg-type]
    width = max(map(len, lists))
    expected = []
    for row in lists:
        fill = [77] * (width - len(row))
        expected.append(fill + row if side == "left" else row + fill)
    assert padded.tolist() == expected
    assert lists_of(from_padded(padded, padded != 77)) == lists


@settings(max_examples=25, deadline=None)
@given(parts=st.lists(ROWS, min_size=1, max_size=4))
def test_joining_columns_joins_their_rows(parts: list[list[list[int]]]) -> None:
    joined = cat_columns([column_of(part) for part in parts])
    assert lists_of(joined) == [row for part in parts for row in part]


def test_trailing_axes_follow_their_token() -> None:
    values = torch.arange(12).view(6, 2)
    column = from_flat(values, torch.tensor([1, 3, 2]))
    taken = take_rows(column, torch.tensor([2, 0]))
    assert flat(taken).tolist() == [[8, 9], [10, 11], [0, 1]]
    assert to_padded(taken, -1).tolist() == [[[8, 9], [10, 11]], [[0, 1], [-1, -1]]]
    mask = torch.tensor([[False, True], [True, False]])
    assert flat(to_padded(taken, -1), mask).tolist() == [[10, 11], [0, 1]]


def test_row_lengths_of_jagged_and_dense_columns() -> None:
    assert row_lengths(column_of([[1], [], [2, 3]])).tolist() == [1, 0, 2]
    assert row_lengths(torch.zeros(2, 4)).tolist() == [4, 4]
    with pytest.raises(BatchError, match="one value per row"):
        row_lengths(torch.zeros(3))


def test_columns_cut_together_share_offsets_so_arithmetic_works() -> None:
    columns = {"a": column_of([[1, 2], [3], [4, 5]]), "b": column_of([[10, 20], [30], [40, 50]])}
    taken = take_columns(columns, torch.tensor([2, 1]))
    assert lists_of(taken["a"] + taken["b"]) == [[44, 55], [33]]
    cut = slice_columns(columns, 1, 3)
    assert lists_of(cut["a"] + cut["b"]) == [[33], [44, 55]]


def test_columns_of_other_lengths_keep_their_own_offsets() -> None:
    columns = {"a": column_of([[1, 2], [3]]), "b": column_of([[7], [8, 9]])}
    taken = take_columns(columns, torch.tensor([1, 0]))
    assert lists_of(taken["a"]) == [[3], [1, 2]]
    assert lists_of(taken["b"]) == [[8, 9], [7]]


def test_jagged_like_puts_other_values_in_the_same_rows() -> None:
    column = column_of([[1, 2], [3]])
    other = jagged_like(column, torch.tensor([0.5, 0.25, 0.125]))
    assert [row.tolist() for row in rows(other)] == [[0.5, 0.25], [0.125]]
    assert lists_of((column * other * 8).to(torch.int64)) == [[4, 4], [3]]
    with pytest.raises(BatchError, match="3 values in all, got 2"):
        jagged_like(column, torch.zeros(2))


def test_a_column_with_holes_is_read_without_them() -> None:
    dense = torch.arange(12).view(3, 4)
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([2, 2, 1])
    holed = torch.nested.narrow(dense, 1, starts, lengths, layout=torch.jagged)
    assert lists_of(holed) == [[0, 1], [5, 6], [10]]
    assert row_lengths(holed).tolist() == [2, 2, 1]
    assert lists_of(take_rows(holed, torch.tensor([2, 1]))) == [[10], [5, 6]]


def test_an_empty_selection_keeps_type_and_axes() -> None:
    column = from_flat(torch.zeros(3, 2), torch.tensor([1, 2]))
    nothing = take_rows(column, torch.tensor([], dtype=torch.int64))
    assert len(nothing) == 0
    assert rows(nothing) == []
    assert flat(nothing).shape == (0, 2)
    assert to_padded(nothing, 0).shape == (0, 0, 2)


def test_only_a_copy_is_compared_by_value() -> None:
    with_nan = torch.tensor([1.0, float("nan")])
    assert same_column(with_nan, with_nan.clone())
    assert not same_column(with_nan, torch.tensor([2.0, float("nan")]))
    assert not same_column(column_of([[1], [2, 3]]), column_of([[1, 2], [3]]))
    assert same_column(column_of([[1], [2, 3]]), column_of([[1], [2, 3]]))
    assert not same_column(torch.zeros(2), torch.zeros(2, dtype=torch.int64))


def test_compact_leaves_behind_the_rows_that_were_not_chosen() -> None:
    whole = torch.arange(1000)
    assert compact(whole) is whole
    assert compact(whole[:10]).untyped_storage().nbytes() == 80


def test_rows_that_differ_in_more_than_length_are_refused() -> None:
    with pytest.raises(BatchError, match=r"only in their length, got torch.float32 \[1\], torch.int64"):
        jagged([torch.zeros(1), torch.zeros(2, dtype=torch.int64)])
    with pytest.raises(BatchError, match="no rows has no type"):
        jagged([])
    with pytest.raises(BatchError, match="add up to 3, but there are 4 values"):
        from_flat(torch.zeros(4), torch.tensor([1, 2]))


def test_parts_of_different_shape_or_type_do_not_join() -> None:
    wide, narrow = torch.zeros(1, 6), torch.zeros(2, 4)
    with pytest.raises(BatchError, match=r"'old_log_probs'.*part 0: dense .* \[4\]; part 2: dense .* \[6\]"):
        cat_columns([narrow, narrow, wide], name="old_log_probs")
    with pytest.raises(BatchError, match="part 0: jagged torch.int64.*part 1: dense"):
        cat_columns([column_of([[1]]), torch.zeros(1, 1, dtype=torch.int64)])
    with pytest.raises(BatchError, match="torch.int64.*torch.float32"):
        cat_columns([torch.zeros(1, dtype=torch.int64), torch.zeros(1)])


def test_other_nested_layouts_are_refused() -> None:
    strided = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])
    with pytest.raises(BatchError, match="layout=torch.jagged"):
        is_jagged(strided)


def test_masks_belong_to_dense_columns_of_their_shape() -> None:
    with pytest.raises(BatchError, match=r"shape \[1, 3\] must be the first two axes .* \[1, 2\]"):
        from_padded(torch.zeros(1, 2), torch.ones(1, 3))
    with pytest.raises(BatchError, match="takes no mask"):
        flat(column_of([[1]]), torch.ones(1, 1))
    with pytest.raises(BatchError, match="side='middle'"):
        to_padded(column_of([[1]]), 0, side="middle")  # type: ignore[arg-type]
