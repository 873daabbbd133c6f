"""Rows over data-parallel ranks: near-equal work, samples of a prompt together where that costs nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.engines.parallel.balance import (
    UNBALANCE,
    balance_parts,
    balanced_rows,
    get_seqlen_balanced_partitions,
)


def loads(workloads: list[int], parts: list[list[int]]) -> list[int]:
    return [sum(workloads[row] for row in part) for part in parts]


def num_split(groups: list[int], parts: list[list[int]]) -> int:
    """Groups whose rows are in more than one part."""
    return sum(sum(any(groups[row] == group for row in part) for part in parts) > 1 for group in set(groups))


def test_samples_of_a_prompt_stay_together_where_that_balances() -> None:
    # Two prompts of four equal samples: one prompt each, though any four rows would balance as well.
    assert balance_parts([5] * 8, [0, 1] * 4, 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_prompt_is_split_where_it_would_hold_everybody_up() -> None:
    # One prompt of four samples over two ranks: whole, one rank would have nothing to do.
    parts = balance_parts([5, 5, 5, 5], [0, 0, 0, 0], 2)
    assert loads([5, 5, 5, 5], parts) == [10, 10]


def test_only_the_heavy_prompt_is_split() -> None:
    workloads = [10] * 8 + [1] * 4
    groups = [0] * 8 + [1, 1, 2, 2]
    parts = balance_parts(workloads, groups, 2)
    assert loads(workloads, parts) == [42, 42]
    assert num_split(groups, parts) == 1


def test_a_prompt_that_is_split_stays_in_large_pieces() -> None:
    # Two prompts over four ranks: half of one prompt each, so that a prompt is computed twice, not four times.
    groups = [0] * 8 + [1] * 8
    parts = balance_parts([5] * 16, groups, 4)
    assert [len(part) for part in parts] == [4, 4, 4, 4]
    assert all(len({groups[row] for row in part}) == 1 for part in parts)


def test_more_parts_than_rows_leave_parts_empty() -> None:
    assert balance_parts([3, 7], [0, 0], 4) == [[0], [1], [], []]
    assert balance_parts([], [], 2) == [[], []]


def test_one_part_has_all_rows() -> None:
    assert balance_parts([3, 7, 1], [0, 1, 0], 1) == [[0, 1, 2]]


@given(rows=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 5)), max_size=24), parts=st.integers(1, 7))
@settings(max_examples=150, deadline=None)
def test_each_row_once_in_order_and_never_much_worse_than_rows_alone(
    rows: list[tuple[int, int]], parts: int
) -> None:
    workloads, groups = [load for load, _ in rows], [group for _, group in rows]
    made = balance_parts(workloads, groups, parts)
    assert len(made) == parts
    assert sorted(row for part in made for row in part) == list(range(len(rows)))
    assert all(part == sorted(part) for part in made)
    filled = [part for part in made if part]
    assert made[: len(filled)] == sorted(filled), "empty parts come last, the others by their first row"
    if len(rows) >= parts:
        alone = get_seqlen_balanced_partitions(workloads, parts)
        assert max(loads(workloads, made)) <= UNBALANCE * max(loads(workloads, alone))


def test_a_real_batch_is_balanced_with_almost_every_prompt_whole() -> None:
    generator = random.Random(0)
    workloads = [200 + min(4096, int(generator.lognormvariate(6, 0.8))) for _ in range(512)]
    groups = [row // 8 for row in range(512)]
    parts = balance_parts(workloads, groups, 4)
    assert max(loads(workloads, parts)) <= 1.06 * sum(workloads) / 4
    assert num_split(groups, parts) == 0


def test_the_answer_does_not_depend_on_the_names_of_groups() -> None:
    workloads = [9, 3, 4, 4, 8, 1]
    assert balance_parts(workloads, ["b", "a", "b", "a", "c", "c"], 2) == balance_parts(
        workloads, [0, 1, 0, 1, 2, 2], 2
    )


def test_calls_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows have 2 groups"):
        balance_parts([1, 2, 3], [0, 0], 2)
    with pytest.raises(ValueError, match="rows cannot go into 0 parts"):
        balance_parts([1], [0], 0)
    with pytest.raises(ValueError, match="length -1"):
        balance_parts([1, -1], [0, 0], 2)


def test_groups_below_a_quarter_of_a_part_are_cut_in_two_where_that_is_needed() -> None:
    # Nine groups of rows with loads 5, 4, 3 and 2, two parts: five groups to four is 1.11 times an even share. Every
    # group is a ninth of all, less than the quarter of a part that is cut first; its halves are 5 and 2, and 4 and 3.
    loads = [5, 4, 3, 2] * 9
    parts = balance_parts(loads, [group for group in range(9) for _ in range(4)], 2)
    assert sum(loads[row] for row in parts[0]) == sum(loads) / 2
    for part in parts:
        for group in range(9):
            assert {loads[row] for row in part if row // 4 == group} in ({5, 2}, {4, 3}, {5, 4, 3, 2}, set())


def test_only_groups_above_a_quarter_of_a_part_are_cut_first() -> None:
    # Loads of 100 for two parts, so a quarter of one is 12.5. Whole, the groups of 45, 31, 13 and 11 make parts of 55
    # and 45 at best. Cutting the 13 = 7 + 6 is enough: 45 + 6 and 31 + 7 + 11. The 11 = 6 + 5 stays together, though
    # cutting it too would give 50 and 50.
    parts = balance_parts([45, 31, 7, 6, 6, 5], ["a", "b", "c", "c", "d", "d"], 2)
    assert parts == [[0, 3], [1, 2, 4, 5]]
    # The same with 47, 38, 9 and 6, of which none is above 12.5, and only the 9 = 5 + 4 above half of that: at best 53
    # whole, then 47 + 4 and 38 + 5 + 6.
    assert balance_parts([47, 38, 5, 4, 3, 3], ["a", "b", "c", "c", "d", "d"], 2) == [[0, 3], [1, 2, 4, 5]]


def test_the_turns_of_an_episode_stay_together() -> None:
    # Ten turns, each behind all before it, are one run of 1,100 tokens. Cut anywhere, the second rank would compute all
    # of it too, and the first one a part of it once more.
    turns = list(range(200, 1200, 100))
    assert balanced_rows(turns, [0, *turns[:-1]], [0] * 10, 2) == [list(range(10)), []]


def test_the_episodes_of_a_prompt_are_cut_between_them() -> None:
    turns = list(range(200, 1200, 100))
    parts = balanced_rows(turns * 2, [0, *turns[:-1]] * 2, [0] * 20, 2)
    assert parts == [list(range(10)), list(range(10, 20))]


def test_a_run_of_rows_is_cut_in_one_place_and_its_second_part_has_the_whole_load() -> None:
    # 60, and five rows more of 60 that save 20 each: 60 + 5 * 40 = 260 together. Three rows to each part: 140 and 140.
    parts = balance_parts([60] * 6, [0] * 6, 2, [0, *[20] * 5])
    assert parts == [[0, 1, 2], [3, 4, 5]]
    # 100, then 60 and 60 that save 10: cut behind the first row, 100 and 110; behind the second, 150 and 60.
    assert balance_parts([100, 60, 60], [0] * 3, 2, [0, 10, 10]) == [[0], [1, 2]]


def test_a_row_saves_nothing_in_another_part() -> None:
    # Behind its row before, the second row adds 1; by itself it has 100, more than any part is meant to have.
    parts = balance_parts([100, 100, 50, 51], [0, 0, 1, 2], 2, [0, 99, 0, 0])
    assert parts == [[0, 1], [2, 3]]
