"""Paired comparisons: by hand, against a full enumeration, and their coverage."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from strop.evaluation.paired_test import compare_paired


def test_by_hand() -> None:
    """Differences 1, 0, 0, -0.5: mean 1/8; of the 4 signs of two sizes, all but none sum to at least 0.5."""
    found = compare_paired([0.0, 0.5, 1.0, 0.5], [1.0, 0.5, 1.0, 0.0])
    assert found.difference == 0.125
    assert (found.num_prompts, found.num_differing) == (4, 2)
    assert found.p_value == 1.0
    deviation = math.sqrt(((7 / 8) ** 2 + 2 * (1 / 8) ** 2 + (5 / 8) ** 2) / 3)
    assert found.detectable == pytest.approx(2.801585 * deviation / 2, rel=1e-5)
    assert found.prompts_needed == math.ceil((2.801585 * deviation / 0.125) ** 2)


def test_signs_are_all_counted_where_few_prompts_differ() -> None:
    draw = random.Random(0)
    first = [draw.choice([0, 0.25, 0.5, 1]) for _ in range(11)]
    second = [draw.choice([0, 0.5, 0.75, 1]) for _ in range(11)]
    differences = [b - a for a, b in zip(first, second, strict=True)]
    signs = list(itertools.product((1, -1), repeat=11))
    reached = sum(
        abs(sum(sign * abs(one) for sign, one in zip(some, differences, strict=True)))
        >= abs(sum(differences)) - 1e-12
        for some in signs
    )
    assert compare_paired(first, second).p_value == pytest.approx(reached / len(signs))


def test_drawn_signs_are_near_the_counted_ones() -> None:
    """McNemar's exact test: of 40 prompts that differ, 28 are better; twice the tail of a fair coin."""
    first = [0.0] * 28 + [1.0] * 12 + [1.0] * 60
    second = [1.0] * 28 + [0.0] * 12 + [1.0] * 60
    exact = 2 * sum(math.comb(40, k) for k in range(28, 41)) / 2**40
    assert compare_paired(first, second).p_value == pytest.approx(exact, abs=0.004)
    assert compare_paired(second, first).difference == -0.16


def test_the_interval_is_that_of_the_mean_where_there_are_many_prompts() -> None:
    draw = random.Random(1)
    differences = [draw.choice([-1.0, 0.0, 0.0, 1.0, 1.0]) for _ in range(400)]
    found = compare_paired([0.0] * 400, differences)
    mean = sum(differences) / 400
    error = math.sqrt(sum((one - mean) ** 2 for one in differences) / 400 / 400)
    assert found.low == pytest.approx(mean - 1.96 * error, abs=0.006)
    assert found.high == pytest.approx(mean + 1.96 * error, abs=0.006)
    assert compare_paired([0.0] * 400, differences) == found, "the same draws"
    assert compare_paired([0.0] * 400, differences, seed=1).low != found.low


@pytest.mark.parametrize(("truth", "spread"), [(0.0, 0.3), (0.15, 0.5)])
def test_ninety_five_of_a_hundred_intervals_hold_the_truth(truth: float, spread: float) -> None:
    draw = random.Random(2)
    held = 0
    for number in range(200):
        differences = [truth + draw.choice([-spread, spread]) for _ in range(60)]
        found = compare_paired([0.0] * 60, differences, seed=number)
        held += found.low <= truth <= found.high
    assert 180 <= held <= 199


def test_prompts_that_are_all_alike_leave_room_for_one_that_is_not() -> None:
    found = compare_paired([1.0] * 100, [1.0] * 100)
    unseen = 1 - 0.025**0.01
    assert (found.difference, found.p_value, found.detectable, found.prompts_needed) == (0.0, 1.0, None, None)
    assert (found.low, found.high) == (pytest.approx(-unseen), pytest.approx(unseen))
    better = compare_paired([0.0] * 100, [1.0] * 100)
    assert (better.high, better.p_value) == (1.0, pytest.approx(1 / 10_001))
    assert better.low == pytest.approx(1 - unseen)


def test_nothing_and_unequal_numbers_cannot_be_compared() -> None:
    for pair in (([], []), ([1.0], [1.0, 0.0])):
        with pytest.raises(ValueError, match="cannot be compared"):
            compare_paired(*pair)


@pytest.mark.slow
def test_the_prompts_needed_show_the_difference_in_four_of_five_comparisons() -> None:
    """Prompts of difficulty Beta(0.6, 0.6), four answers each; the second model closes 15 % of what is missing."""
    draw = random.Random(3)

    def pair() -> tuple[float, float]:
        rate = draw.betavariate(0.6, 0.6)
        better = rate + 0.15 * (1 - rate)
        return sum(draw.random() < rate for _ in range(4)) / 4, sum(
            draw.random() < better for _ in range(4)
        ) / 4

    first, second = zip(*(pair() for _ in range(4000)), strict=True)
    needed = compare_paired(first, second).prompts_needed
    assert needed is not None
    shown = 0
    for number in range(200):
        before, after = zip(*(pair() for _ in range(needed)), strict=True)
        shown += compare_paired(before, after, seed=number).low > 0
    assert 140 <= shown <= 178  # binomial, n = 200: 160, three standard deviations are 17


@pytest.mark.slow
def test_interval_and_p_value_are_those_of_scipy() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    draw = random.Random(4)
    first = [draw.choice([0.0, 0.25, 0.5, 0.75]) for _ in range(60)]
    second = [min(1.0, one + draw.choice([-0.25, 0.0, 0.0, 0.25, 0.25])) for one in first]
    differences = [b - a for a, b in zip(first, second, strict=True)]
    found = compare_paired(first, second)
    boot = scipy_stats.bootstrap(
        (differences,), lambda some, axis: some.mean(axis), method="percentile", n_resamples=10_000, rng=1
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((boot.low, boot.high), abs=0.0045)  # steps of 1/240
    permuted = scipy_stats.permutation_test(
        (differences,), lambda some, axis: some.mean(axis), permutation_type="samples",
        n_resamples=20_000, rng=2, vectorized=True,
    )  # fmt: skip
    assert found.p_value == pytest.approx(permuted.pvalue, abs=0.01)
