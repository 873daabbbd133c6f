from __future__ import annotations

import json
import random
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data import PromptSampler, parse_visit_uid, val_uid, visit_uid

row_lists = st.lists(st.integers(0, 10**7), min_size=1, max_size=12, unique=True)


def all_visits(sampler: PromptSampler) -> list[tuple[int, int]]:
    visits: list[tuple[int, int]] = []
    while step := sampler.next():
        visits += step
    return visits


@settings(max_examples=40, deadline=None)
@given(
    rows=row_lists,
    per_step=st.integers(1, 30),
    seed=st.integers(0, 5),
    name=st.sampled_from(["shuffled", "in_order"]),
)
def test_every_epoch_visits_each_row_once(rows: list[int], per_step: int, seed: int, name: str) -> None:
    sampler = PromptSampler(rows, per_step, seed, name, num_epochs=3)
    steps = []
    while step := sampler.next():
        steps.append(step)
    visits = list(chain.from_iterable(steps))
    for epoch in range(3):
        start = epoch * len(rows)
        part = visits[start : start + len(rows)]
        assert {number for number, _ in part} == {epoch}
        assert sorted(row for _, row in part) == sorted(rows)
    assert len(visits) == 3 * len(rows)
    assert [len(step) for step in steps[:-1]] == [per_step] * (len(steps) - 1)
    assert 1 <= len(steps[-1]) <= per_step
    assert sampler.num_steps == len(steps)
    assert sampler.is_finished


@settings(max_examples=40, deadline=None)
@given(rows=row_lists, per_step=st.integers(1, 30), before=st.integers(0, 10), after=st.integers(1, 10))
def test_restore_continues_exactly(rows: list[int], per_step: int, before: int, after: int) -> None:
    whole = PromptSampler(rows, per_step, 7)
    consumed = [visit for _ in range(before) for visit in whole.next()]
    later = PromptSampler(rows, per_step, 7)
    later.restore([visit_uid(*visit) for visit in consumed], whole.state())
    assert [later.next() for _ in range(after)] == [whole.next() for _ in range(after)]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(2, 6),
    per_step=st.integers(1, 5),
    epochs=st.integers(1, 3),
    before=st.integers(0, 20),
    seed=st.integers(0, 10**6),
)
def test_a_row_that_rested_is_not_visited_in_that_epoch_after_a_restore(
    rows: int, per_step: int, epochs: int, before: int, seed: int
) -> None:
    results = random.Random(seed)
    whole = PromptSampler(range(rows), per_step, 7)

    def step() -> list[tuple[int, int]]:
        visits = whole.next()
        for epoch, row in visits:
            if results.random() < 0.4:
                whole.defer(row, epoch, epochs=epochs)
            elif row and results.random() < 0.1:  # row 0 stays
                whole.retire(row, epoch)
        return visits

    consumed = [visit for _ in range(before) for visit in step()]
    saved = json.loads(json.dumps(whole.curriculum()))
    later = PromptSampler(range(rows), per_step, 7)
    later.restore([visit_uid(*visit) for visit in consumed], whole.state(), saved)
    assert later.curriculum() == saved
    assert [later.next() for _ in range(9)] == [whole.next() for _ in range(9)]


@settings(max_examples=40, deadline=None)
@given(rows=row_lists, per_step=st.integers(1, 5), data=st.data())
def test_restore_after_any_set_of_visits_loses_and_repeats_nothing(
    rows: list[int], per_step: int, data: st.DataObject
) -> None:
    # Visits end in any order when generation runs ahead: the consumed set need not be a beginning.
    every = all_visits(PromptSampler(rows, per_step, 3, num_epochs=3))
    consumed = data.draw(st.sets(st.sampled_from(every)))
    sampler = PromptSampler(rows, per_step, 3, num_epochs=3)
    sampler.restore({visit_uid(*visit) for visit in consumed})
    assert all_visits(sampler) == [visit for visit in every if visit not in consumed]


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    rows = list(range(100, 150))
    one, two = PromptSampler(rows, 4, 0), PromptSampler(rows, 9, 0)
    two.next()
    assert one.order(0) == two.order(0)
    assert one.order(0) != one.order(1)
    assert one.order(0) != PromptSampler(rows, 4, 1).order(0)
    assert one.order(0) != rows
    assert PromptSampler(rows, 4, 0, name="in_order").order(5) == rows


def test_a_step_crosses_the_end_of_an_epoch() -> None:
    sampler = PromptSampler([4, 5, 6], 2, 0, name="in_order")
    assert [sampler.next() for _ in range(3)] == [[(0, 4), (0, 5)], [(0, 6), (1, 4)], [(1, 5), (1, 6)]]
    assert sampler.num_steps is None


def test_epoch_is_that_of_the_next_visit() -> None:
    sampler = PromptSampler([4, 5, 6], 2, 0, name="in_order")
    epochs = [sampler.epoch]
    for _ in range(3):
        sampler.next()
        epochs.append(sampler.epoch)
    assert epochs == [0, 0, 1, 2]


def test_a_finished_sampler_gives_empty_steps() -> None:
    sampler = PromptSampler([1, 2, 3], 2, 0, num_epochs=1)
    assert [len(sampler.next()) for _ in range(4)] == [2, 1, 0, 0]


def test_visit_ids() -> None:
    assert visit_uid(0, 17) == "e0-000017"
    assert visit_uid(12, 12345678) == "e12-12345678"
    assert val_uid(3) == "val-000003"
    for visit in ((0, 0), (3, 999_999), (41, 10_000_000)):
        assert parse_visit_uid(visit_uid(*visit)) == visit
    for text in ("val-000003", "e0-17", "e-1-000017", "e0-000017/1"):
        with pytest.raises(ValueError, match="is no id of a training visit"):
            parse_visit_uid(text)


def test_restoring_another_run_is_refused() -> None:
    sampler = PromptSampler([0, 1, 2], 2, 0)
    with pytest.raises(ValueError, match="already trained on prompt e0-000009, but row 9 is not among the 3"):
        sampler.restore(["e0-000009"])
    with pytest.raises(ValueError, match="seed was 1, is 0"):
        sampler.restore([], PromptSampler([0, 1, 2], 2, 1).state())
    with pytest.raises(ValueError, match="num_rows was 2, is 3.*rows_digest"):
        sampler.restore([], PromptSampler([0, 1], 2, 0).state())
    with pytest.raises(ValueError, match=r"of the run to resume: rows_digest was [^;]*; use"):
        sampler.restore([], PromptSampler([0, 1, 3], 2, 0).state())
    # The size of a step does not change the order.
    sampler.restore([], PromptSampler([0, 1, 2], 8, 0).state())


def test_a_sampler_without_rows_or_with_repeats_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        PromptSampler([], 2, 0)
    with pytest.raises(ValueError, match="must not repeat"):
        PromptSampler([1, 1], 2, 0)
    with pytest.raises(ValueError, match="data.prompts_per_step is 0"):
        PromptSampler([1], 0, 0)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 30),
    per_step=st.integers(1, 12),
    first=st.integers(1, 3),
    more=st.integers(0, 3),
    data=st.data(),
)
def test_a_run_that_goes_on_for_more_epochs_visits_every_row_in_each(
    rows: int, per_step: int, first: int, more: int, data: st.DataObject
) -> None:
    short = PromptSampler(range(rows), per_step, 5, num_epochs=first)
    steps = [short.next() for _ in range(short.num_steps or 0)]
    done = data.draw(st.integers(0, len(steps)), label="steps done")
    consumed = [visit for step in steps[:done] for visit in step]
    later = PromptSampler(range(rows), per_step, 5, num_epochs=first + more)
    later.restore([visit_uid(*visit) for visit in consumed], later.state(), step=done)
    assert later.num_steps is not None
    rest = [later.next() for _ in range(later.num_steps - done)]
    assert all(rest), "no step is empty"
    assert later.is_finished, "and none is missing"
    every = sorted(consumed + [visit for step in rest for visit in step])
    assert every == [(epoch, row) for epoch in range(first + more) for row in range(rows)]


def test_steps_that_took_more_visits_leave_the_length_of_a_run_as_it_was() -> None:
    # Filtered groups: 16 of 20 rows were visited by the first of three steps. Its schedule was made for three.
    sampler = PromptSampler(range(20), 8, 0, name="in_order", num_epochs=1)
    sampler.restore([visit_uid(0, row) for row in range(16)], step=1)
    assert sampler.num_steps == 3
