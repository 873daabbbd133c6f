"""How far generation runs ahead, and which groups a step takes."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.trainer.collectors.pacing import StalenessBound


def pace(size: int, bound: float, num_steps: int = 100) -> StalenessBound:
    return StalenessBound(groups_per_step=size, max_staleness=bound, num_steps=num_steps)


@pytest.mark.parametrize(
    ("bound", "first", "then"), [(0, 4, 4), (1, 8, 4), (2, 12, 4), (0.5, 6, 4), (0.25, 5, 4), (0.1, 4, 4)]
)
def test_the_sampler_begins_as_many_groups_as_the_bound_allows(bound: float, first: int, then: int) -> None:
    one = pace(4, bound)
    assert one.capacity(1, 0) == first
    assert one.capacity(2, first) == then
    assert one.capacity(2, first + then) == 0


def test_a_fraction_that_is_no_group_adds_up_over_the_steps() -> None:
    one, begun, rooms = pace(4, 0.3), 0, []
    for step in range(1, 6):
        rooms.append(one.capacity(step, begun))
        begun += rooms[-1]
    assert rooms == [5, 4, 4, 4, 4], "floor of 5.2, 9.2, 13.2, ..."


def test_nothing_is_begun_that_no_step_would_take() -> None:
    assert pace(4, 3, num_steps=2).capacity(1, 0) == 8
    assert pace(4, 3, num_steps=2).capacity(2, 8) == 0


def test_without_a_lead_a_step_takes_all_of_its_own_in_their_order() -> None:
    begun = {"a": 6, "b": 6, "c": 6}
    assert pace(3, 0).select(7, begun, ["c", "a"]) is None
    assert pace(3, 0).select(7, begun, ["c", "a", "b"]) == ("a", "b", "c")


def test_the_first_to_end_are_taken_where_the_others_find_room_later() -> None:
    begun = dict.fromkeys("abcd", 0)
    assert pace(2, 1).select(1, begun, ["d"]) is None
    assert pace(2, 1).select(1, begun, ["d", "b", "a"]) == ("b", "d")
    # The others are at their end: later ones wait.
    begun = {"a": 0, "c": 0, "e": 1, "f": 1}
    assert pace(2, 1).must_train(2, begun) == {"a", "c"}
    assert pace(2, 1).select(2, begun, ["e", "f", "c"]) is None
    assert pace(2, 1).select(2, begun, ["e", "f", "c", "a"]) == ("a", "c")


def fits(begun: dict[str, int], left: set[str], one: StalenessBound, step: int) -> bool:
    """Whether the steps after this one can train what is left in time, by trying every order of deadlines."""
    lasts = sorted(one.last_step(begun[uid]) for uid in left)
    return all(
        last >= step + 1 + place // one.groups_per_step for place, last in enumerate(lasts)
    )  # earliest deadline first


@given(
    size=st.integers(1, 4),
    bound=st.sampled_from([0, 0.25, 0.5, 1, 1.5, 2, 3]),
    num_steps=st.integers(1, 6),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=200, deadline=None)
def test_every_group_is_trained_in_time_whatever_ends_first(
    size: int, bound: float, num_steps: int, seed: int
) -> None:
    rng, one = random.Random(seed), pace(size, bound, num_steps)
    begun: dict[str, int] = {}
    ended: list[str] = []
    trained: list[str] = []
    names = (f"g{number}" for number in itertools.count())
    num_begun = 0
    for step in range(1, num_steps + 1):
        for _ in range(room := one.capacity(step, num_begun)):
            begun[next(names)] = step - 1
        num_begun += room
        assert num_begun <= math.floor((step + bound) * size)
        while (chosen := one.select(step, begun, ended)) is None:
            playing = [uid for uid in begun if uid not in ended]
            assert playing, "all have ended, and the step still waits"
            ended.append(rng.choice(playing))
        assert len(chosen) == size
        assert set(chosen) <= set(ended)
        assert all(step - 1 - begun[uid] <= math.ceil(bound) for uid in chosen)
        assert fits(begun, begun.keys() - set(chosen), one, step)
        # Whoever ended first is only passed over for one that could not wait.
        over = [uid for uid in ended if uid not in chosen]
        for early, late in itertools.product(over, chosen):
            if ended.index(early) < ended.index(late):
                swapped = begun.keys() - (set(chosen) - {late} | {early})
                assert not fits(begun, set(swapped), one, step)
        for uid in chosen:
            trained.append(uid)
            ended.remove(uid)
            del begun[uid]
    assert len(set(trained)) == len(trained) == num_steps * size
    assert not begun
