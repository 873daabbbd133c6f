"""Samplers that see results: their orders, what they may return, and a restore in the middle of an epoch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from strop.data import DataConfig, PromptSampler, RowResult, register_sampler, visit_uid
from strop.data.curriculum import SAMPLERS, ordered_rows
from strop.rewards import Outcome
from strop.trainer.row_results import row_results
from strop.utils.rng import permutation, random_key
from strop.workers.reports import EpisodeReport

ROWS = np.array([10, 11, 12, 13, 14], dtype=np.int64)


@pytest.fixture
def samplers() -> Iterator[None]:
    """What is registered in between is forgotten."""
    before = dict(SAMPLERS)
    yield
    SAMPLERS.clear()
    SAMPLERS.update(before)


def result(pass_rate: float, *, step: int = 1) -> RowResult:
    return RowResult(visits=1, mean_score=pass_rate, pass_rate=pass_rate, last_step=step)


def scored(rates: Mapping[int, float]) -> list[EpisodeReport]:
    """Samples of rows of which these shares pass."""
    return [
        EpisodeReport(
            uid=visit_uid(0, row), sample_index=number, data_source="", num_prompt_tokens=1,
            outcome=Outcome(kind="score", score=float(number < round(28 * rate))),
        )
        for row, rate in rates.items()
        for number in range(28)
    ]  # fmt: skip


RESULTS = {10: result(0.25), 11: result(1.0), 12: result(0.0), 14: result(0.75)}


def test_the_built_in_orders_by_hand() -> None:
    # Row 13 was never scored and counts as 1/2. Distances to 1/2: 1/4, 1/2, 1/2, 0, 1/4; equal ones are shuffled.
    def order(name: str) -> list[int]:
        return ordered_rows(name, ROWS, RESULTS, epoch=3, seed=7).tolist()

    assert order("in_order") == [10, 11, 12, 13, 14]
    assert order("easy_first") == [11, 14, 13, 10, 12]
    assert order("hard_first") == [12, 10, 13, 14, 11]
    assert order("near_half")[0] == 13
    assert set(order("near_half")[1:3]) == {10, 14}


def test_shuffled_is_the_permutation_of_seed_and_epoch() -> None:
    for epoch in range(3):
        expected = ROWS[permutation(random_key(7, "prompt_order", epoch), 5)].tolist()
        assert ordered_rows("shuffled", ROWS, RESULTS, epoch=epoch, seed=7).tolist() == expected


def test_rows_that_nobody_scored_are_shuffled() -> None:
    for name in ("easy_first", "hard_first", "near_half"):
        for epoch in range(2):
            assert np.array_equal(
                ordered_rows(name, ROWS, {}, epoch=epoch, seed=1),
                ordered_rows("shuffled", ROWS, {}, epoch=epoch, seed=1),
            )


def test_the_next_epoch_sees_the_results_of_this_one() -> None:
    sampler = PromptSampler([0, 1, 2], 3, 0, "hard_first")
    sampler.next()
    sampler.record(1, row_results(scored({0: 1.0, 1: 0.0, 2: 0.5}), step=1))
    assert sampler.next() == [(1, 1), (1, 2), (1, 0)]


def test_an_order_is_not_changed_within_its_epoch_unless_it_is_asked_for() -> None:
    for every in (0, 1):
        sampler = PromptSampler(list(range(6)), 2, 0, "hard_first", reorder_every=every)
        first = [row for _, row in sampler.next()]
        planned = [row for row in sampler.order(0) if row not in first]
        sampler.record(
            1, row_results(scored(dict(zip(planned, (1.0, 0.75, 0.25, 0.0), strict=True))), step=1)
        )
        rest = [row for _ in range(2) for _, row in sampler.next()]
        assert rest == (planned[::-1] if every else planned)
        assert sorted(first + rest) == list(range(6)), "each row once per epoch, also when ordered again"


@pytest.mark.parametrize("every", [0, 2])
def test_a_restored_sampler_goes_on_in_the_order_it_had(every: int) -> None:
    def make() -> PromptSampler:
        return PromptSampler(list(range(7)), 3, 5, "near_half", reorder_every=every)

    def play(sampler: PromptSampler, step: int) -> list[tuple[int, int]]:
        visits = sampler.next()
        sampler.record(
            step, row_results(scored({row: ((row * 5 + step) % 7) / 7 for _, row in visits}), step=step)
        )
        return visits

    whole = make()
    done = [play(whole, step) for step in range(1, 13)]
    for cut in range(1, 12):
        one = make()
        before = [visit for step in range(1, cut + 1) for visit in play(one, step)]
        saved = json.loads(json.dumps({"state": one.state(), "progress": one.progress()}))
        again = make()
        again.restore([visit_uid(*visit) for visit in before], saved["state"], {}, saved["progress"])
        assert [play(again, step) for step in range(cut + 1, 13)] == done[cut:]


def test_another_sampler_cannot_take_over_a_run() -> None:
    with pytest.raises(ValueError, match="sampler was 'shuffled', is 'in_order'"):
        PromptSampler([0, 1], 1, 0, "in_order").restore([], PromptSampler([0, 1], 1, 0).state())


@pytest.mark.usefixtures("samplers")
def test_visits_are_counted_over_the_run() -> None:
    seen: list[Mapping[int, RowResult]] = []

    @register_sampler("watching")
    def watching(rows: Sequence[int], results: Mapping[int, RowResult]) -> Sequence[int]:
        seen.append(results)
        return list(reversed(rows))

    sampler = PromptSampler([3, 4], 2, 0, "watching")
    for step in range(1, 4):
        assert [row for _, row in sampler.next()] == [4, 3]
        sampler.record(step, row_results(scored({4: 0.5}), step=step))
    assert seen == [
        {},
        {4: result(0.5)},
        {4: RowResult(visits=2, mean_score=0.5, pass_rate=0.5, last_step=2)},
    ]


@pytest.mark.usefixtures("samplers")
@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ([10, 11], r"returned 2 entries, but a sampler returns each of the 5 rows once"),
        ([10, 11, 12, 13, 13], r"returned 5 entries, but a sampler returns each"),
        ([10, 11, 12, 13, 99], r"returned 5 entries, among them 99, which is none of them"),
        ([0.5, 1.5, 2.5, 3.5, 4.5], r"among them 0.5, which is none"),
        (None, r"mine.<locals>.bad returned a NoneType, but a sampler returns a sequence"),
    ],
)
def test_what_is_no_order_is_told_with_the_functions_name(returned: object, sentence: str) -> None:
    def mine() -> None:
        @register_sampler("bad")
        def bad(rows: Sequence[int]) -> Sequence[int]:
            return returned  # type: ignore[return-value]

    mine()
    with pytest.raises(ValueError, match=r"sampler 'bad': .*" + sentence):
        ordered_rows("bad", ROWS, {}, epoch=0, seed=0)


@pytest.mark.usefixtures("samplers")
def test_a_function_that_nobody_can_call_is_refused_when_it_is_registered() -> None:
    with pytest.raises(
        ValueError, match=r"has the parameters data, n, but a sampler is order\(rows, results"
    ):

        @register_sampler("odd")
        def odd(data: Sequence[int], n: int) -> Sequence[int]:
            return data

    with pytest.raises(ValueError, match="unknown sampler 'easy'; known: easy_first, hard_first"):
        PromptSampler([1], 1, 0, "easy")


class Rotating:
    """In verl's form, without its base class."""

    def __init__(self, data_source: Sequence[int], data_config: Mapping[str, object]) -> None:
        self.size, self.shift = len(data_source), 0

    def __iter__(self) -> Iterator[int]:
        self.shift += 1
        return iter([(place + self.shift) % self.size for place in range(self.size)])

    def state_dict(self) -> dict[str, object]:
        return {"shift": self.shift}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.shift = state["shift"]


@pytest.mark.usefixtures("samplers")
def test_a_class_in_the_fields_form_gives_positions_and_keeps_its_state() -> None:
    register_sampler("rotating")(Rotating)
    rows = [5, 6, 7]

    def make() -> PromptSampler:
        return PromptSampler(rows, 2, 0, "rotating", data=DataConfig(sampler="rotating"))

    whole = make()
    visits = [whole.next() for _ in range(4)]
    assert visits[:2] == [[(0, 6), (0, 7)], [(0, 5), (1, 7)]]
    one = make()
    before = [*one.next(), *one.next()]
    again = make()
    again.restore([visit_uid(*visit) for visit in before], one.state(), {}, one.progress())
    assert [again.next(), again.next()] == visits[2:]


@pytest.mark.usefixtures("samplers")
def test_a_class_without_a_state_is_refused() -> None:
    class Forgetful:
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(
        ValueError, match="Forgetful has no state_dict and no load_state_dict, so a run that is"
    ):
        register_sampler("forgetful")(Forgetful)

    class Odd(Rotating):
        def state_dict(self) -> dict[str, object]:
            return {"rows": {1, 2}}

    register_sampler("odd")(Odd)
    with pytest.raises(ValueError, match="Odd.state_dict returned what a checkpoint cannot hold"):
        PromptSampler([1], 1, 0, "odd", data=DataConfig(sampler="odd")).progress()
