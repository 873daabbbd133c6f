"""Statistics of answers at the ends of what they take, and at sizes where a node or a digit too few would show."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest

from strop.algorithms.best_of_k import (
    Moments,
    best_at_k,
    maj_at_k,
    majority_probabilities,
    pass_at_k,
    worst_at_k,
)
from strop.algorithms.intervals import clustered_interval, mean_interval, wilson_interval


@pytest.mark.parametrize("numbers", [(1, 0, 1), (1, 1, 1), (5, 0, 5), (5, 5, 1), (5, 5, 5)])
def test_pass_at_k_takes_all_and_none(numbers: tuple[int, int, int]) -> None:
    total, correct, k = numbers
    assert pass_at_k(total, correct, k) == float(correct > 0)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((4, -1, 1), "-1 of 4 samples are said to be correct: count again"),
        ((4, 5, 1), "5 of 4 samples"),
        ((4, 2, 0), "pass@0 cannot be estimated .* use a k between 1 and 4, or draw at least 0"),
        ((4, 2, 5), "pass@5 cannot be estimated .* between 1 and 4, or draw at least 5 samples"),
        ((0, 0, 1), "pass@1 cannot be estimated"),
    ],
)
def test_counts_that_cannot_be(numbers: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pass_at_k(*numbers)


def test_one_draw_is_the_plain_mean() -> None:
    values = [0.0, 2.0, 7.0]
    std = math.sqrt((9 + 1 + 16) / 3)
    for got in (best_at_k(values, 1), worst_at_k(values, 1), maj_at_k(values, ["a", "b", "b"], 1)):
        assert (got.mean, got.std) == pytest.approx((3.0, std), abs=1e-12)


def test_one_value_has_no_spread() -> None:
    for got in (best_at_k([0.1], 7), worst_at_k([0.1], 7), maj_at_k([0.1], ["a"], 7)):
        assert got.mean == pytest.approx(0.1, abs=1e-12)
        assert got.std == pytest.approx(0.0, abs=1e-9)


def test_many_draws_reach_the_ends() -> None:
    assert best_at_k([1.0, 2.0, 5.0], 500).mean == pytest.approx(5.0, abs=1e-9)
    assert worst_at_k([1.0, 2.0, 5.0], 500) == Moments(
        mean=pytest.approx(1.0), std=pytest.approx(0.0, abs=1e-6)
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda: best_at_k([], 1),
        lambda: worst_at_k([], 1),
        lambda: maj_at_k([], [], 1),
        lambda: best_at_k([1.0], 0),
        lambda: worst_at_k([1.0], 0),
        lambda: maj_at_k([1.0], ["a"], 0),
        lambda: best_at_k([1.0], -1),
    ],
)
def test_no_draws_and_no_values_are_refused(call: Callable[[], Moments]) -> None:
    with pytest.raises(ValueError, match="draws from . values: at least one of each is needed"):
        call()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_values_are_finite(wrong: float) -> None:
    for values in ([wrong], [0.0, wrong], [wrong, 0.0]):
        for call in (best_at_k, worst_at_k):
            with pytest.raises(ValueError, match="values must be finite, got"):
                call(values, 2)
        with pytest.raises(ValueError, match="values must be finite, got"):
            maj_at_k(values, ["a"] * len(values), 2)


def test_predictions_and_values_are_as_many() -> None:
    for predictions in (["a"], ["a", "b", "c"]):
        with pytest.raises(ValueError, match=f"2 values and {len(predictions)} predictions"):
            maj_at_k([0.0, 1.0], predictions, 2)


def winners(sizes: tuple[int, ...], k: int) -> dict[int, float]:
    """Chance that an answer held by so many samples wins, by counting all ways in which k votes can fall."""
    total = sum(sizes)
    chance = [0.0] * len(sizes)
    for votes in itertools.product(range(k + 1), repeat=len(sizes)):
        if sum(votes) != k:
            continue
        ways = math.factorial(k) / math.prod(math.factorial(v) for v in votes)
        probability = ways * math.prod((size / total) ** v for size, v in zip(sizes, votes, strict=True))
        first = [number for number, v in enumerate(votes) if v == max(votes)]
        for number in first:
            chance[number] += probability / len(first)
    by_size = Counter(sizes)
    return {
        size: sum(c for s, c in zip(sizes, chance, strict=True) if s == size) / by_size[size]
        for size in by_size
    }


@pytest.mark.parametrize(
    ("sizes", "k"),
    [
        ((1,), 1),
        ((1, 1), 1),
        ((3,), 4),
        ((1, 2), 2),
        ((1, 1, 1), 3),
        ((1, 1, 1, 1), 8),  # up to seven ties beside the winner
        ((1, 1, 1, 1, 1), 5),
        ((1, 1, 2, 3), 7),
        ((2, 2, 2, 5), 9),
        ((1, 1, 1, 1, 1, 1), 6),
        ((1, 2, 3, 4), 12),
    ],
)
def test_majorities_equal_all_ways_that_votes_can_fall(sizes: tuple[int, ...], k: int) -> None:
    assert majority_probabilities(sizes, k) == pytest.approx(winners(sizes, k), abs=1e-12)


def test_wilson_takes_fractions_and_the_ends_of_its_range() -> None:
    low, high = wilson_interval(0.5, 1.5)
    assert 0 < low < 1 / 3 < high < 1
    # The ends are exactly 0 and 1, however the rounding of center and width falls.
    for trials in (1, 3, 7, 49, 0.5):
        assert wilson_interval(0, trials)[0] == 0.0
        assert wilson_interval(trials, trials)[1] == 1.0


def test_wilson_is_symmetric() -> None:
    for successes, trials in ((1, 3), (2, 9), (0.25, 1.0)):
        low, high = wilson_interval(successes, trials)
        turned = wilson_interval(trials - successes, trials)
        assert turned == pytest.approx((1 - high, 1 - low), abs=1e-12)


@pytest.mark.parametrize(
    "numbers", [(0, 0), (0, -1), (-1, 3), (-1e-9, 3), (4, 3), (3 + 1e-9, 3), (math.nan, 3)]
)
def test_counts_without_an_interval(numbers: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="have no interval: count again"):
        wilson_interval(*numbers)


def test_rounding_never_leads_below_0() -> None:
    # Center minus half the width is -2.8e-17 here.
    assert wilson_interval(1.2559600969192855e-14, 7)[0] == 0.0


def test_an_interval_over_clusters_by_hand() -> None:
    # Three prompts with two answers each, of which 2, 1 and 0 pass: p = 1/2 and v = (1 + 0 + 1) / 36 = 1/18, as of
    # (1/4) / (1/18) = 4.5 answers; three prompts tell so little of v that no more than 3 are left. With z = 1.959964
    # and z^2 = 3.841459 half the width of Wilson's interval is
    # z sqrt(0.25 / 3 + z^2 / (4 * 3^2)) / (1 + z^2 / 3) = 1.959964 * 0.435936 / 2.280486 = 0.374665.
    expected = (0.5 - 0.374665, 0.5 + 0.374665)
    assert clustered_interval([2, 1, 0], [2, 2, 2]) == pytest.approx(expected, abs=2e-6)


def test_the_ends_of_an_interval_over_clusters() -> None:
    assert clustered_interval([1, 0, 0, 1, 0], [1] * 5) == pytest.approx(wilson_interval(2, 5))
    assert clustered_interval([8, 0, 0, 8, 0], [8] * 5) == pytest.approx(wilson_interval(2, 5))
    # Clusters that are more equal than chance would have it: never narrower than independent answers.
    assert clustered_interval([1, 1, 1], [2, 2, 2]) == pytest.approx(wilson_interval(1.5, 3))
    assert clustered_interval([1] * 99, [2] * 99)[0] < wilson_interval(99, 198)[0] < 0.5
    assert clustered_interval([1, 0, 2], [3, 1, 4]) == pytest.approx(wilson_interval(3, 8))
    # A single success of six: v = ((1 - 1/3)^2 + 2 (1/3)^2) / 36 = 1/54, so n* = (1/6)(5/6) 54 is more than 6, of which
    # three prompts leave 3.
    assert clustered_interval([1, 0, 0], [2, 2, 2]) == pytest.approx(wilson_interval(0.5, 3))
    # A cluster without a trial is none, one with a single trial is one.
    assert clustered_interval([3, 0, 1], [3, 0, 1]) == pytest.approx(wilson_interval(2, 2))
    for total in (0, 8):
        assert clustered_interval([total] * 5, [8] * 5) == pytest.approx(wilson_interval(total / 8 * 5, 5))


def test_an_interval_of_a_mean_over_clusters_by_hand() -> None:
    # Rewards 1, 2 and 3 of three prompts: mean 2, standard error 1 / sqrt(3), and t = 4.302653 with 2 degrees of
    # freedom (tables of Student's distribution): half the width is 2.484138.
    assert mean_interval([1, 2, 3], [1, 1, 1]) == pytest.approx((-0.484138, 4.484138), abs=1e-6)
    # Two prompts with two answers each, rewards 1, 1 and 0, 0: mean 1/2, v = 2 (1 + 1) / 16 = 1/4, and t = 12.706205.
    assert mean_interval([2, 0], [2, 2]) == pytest.approx((0.5 - 6.353102, 0.5 + 6.353102), abs=1e-6)
    # 20 prompts, half of them -1 and half 3: mean 1, standard error 2 sqrt(20 / 19) / sqrt(20), t = 2.093024.
    expected = (1 - 0.960345, 1 + 0.960345)
    assert mean_interval([-1.0, 3.0] * 10, [1] * 20) == pytest.approx(expected, abs=1e-3)


def test_a_mean_of_equal_rewards_or_of_one_prompt_has_no_interval() -> None:
    assert mean_interval([0.1] * 30, [1] * 30) is None
    assert mean_interval([0.3, 0.1, 0.2], [3, 1, 2]) is None
    assert mean_interval([3.0], [4]) is None
    assert mean_interval([3.0, 0.0], [4, 0]) is None  # a prompt without a reward says nothing
    assert mean_interval([], []) is None


def test_a_variance_of_few_clusters_counts_less() -> None:
    """Ten prompts, four answers each, of which 1 or 3 pass: p = 1/2, v = 10 / 1600, as of 40 answers; t(9) = 2.262157
    and t(39) = 2.022691 leave 40 (2.022691 / 2.262157)^2 (9/10) / (39/40) = 29.5206 of them."""
    low, high = clustered_interval([1, 3] * 5, [4] * 10)
    assert (low, high) == pytest.approx(wilson_interval(29.5206 / 2, 29.5206), abs=2e-5)


def test_lists_of_different_lengths_are_no_clusters() -> None:
    with pytest.raises(ValueError, match="shorter|longer"):
        clustered_interval([0, 0], [1])
    with pytest.raises(ValueError, match="have no interval"):
        clustered_interval([], [])
