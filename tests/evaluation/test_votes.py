from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from references import votes as reference
from strop.algorithms.best_of_k import (
    best_at_k,
    maj_at_k,
    majority_probabilities,
    pass_at_k,
    vote_at_k,
    worst_at_k,
)
from strop.algorithms.intervals import student_quantile, wilson_interval

small_values = st.lists(st.sampled_from([0.0, 0.5, 1.0, -2.0, 3.0]), min_size=1, max_size=5)


def test_pass_at_k_by_hand() -> None:
    # Four samples, one correct: a pair contains it in 3 of 6 cases.
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(4, 0, 3) == 0.0


@given(correct=st.lists(st.booleans(), min_size=1, max_size=8), data=st.data())
@settings(max_examples=60, deadline=None)
def test_pass_at_k_counts_subsets(correct: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(correct)))
    expected = reference.pass_rate_of_subsets(correct, k)
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_exact_for_many_samples() -> None:
    # 1 - prod_{i=0}^{k-1} (n - c - i) / (n - i)
    n, c, k = 10_000, 3, 100
    expected = 1 - math.prod((n - c - i) / (n - i) for i in range(k))
    assert pass_at_k(n, c, k) == pytest.approx(expected, rel=1e-10)


def test_best_worst_and_majority_of_two_by_hand() -> None:
    # Two draws from (0, 1): the best is 1 in 3 of 4 cases.
    assert best_at_k([0.0, 1.0], 2).mean == 0.75
    assert best_at_k([0.0, 1.0], 2).std == pytest.approx(math.sqrt(0.75 * 0.25))
    assert worst_at_k([0.0, 1.0], 2).mean == 0.25
    # Three draws from a (value 0) and b, b (value 1): b needs two of three, with chance 2/3 each:
    # 3 * (4/9)(1/3) + 8/27 = 20/27.
    assert maj_at_k([0.0, 1.0, 1.0], ["a", "b", "b"], 3).mean == pytest.approx(20 / 27, abs=1e-12)


@given(values=small_values, k=st.integers(1, 5), data=st.data())
@settings(max_examples=60, deadline=None)
def test_draws_equal_the_list_of_all_draws(values: list[float], k: int, data: st.DataObject) -> None:
    predictions = data.draw(st.lists(st.sampled_from("abc"), min_size=len(values), max_size=len(values)))
    cases = [
        (best_at_k(values, k), lambda draw: max(values[i] for i in draw)),
        (worst_at_k(values, k), lambda draw: min(values[i] for i in draw)),
        (
            maj_at_k(values, predictions, k),
            lambda draw: reference.majority_value(values, predictions, draw),
        ),
    ]
    for moments, value_of in cases:
        mean, std = reference.over_all_draws(len(values), k, value_of)
        assert moments.mean == pytest.approx(mean, abs=1e-10)
        # A standard deviation of 0 is the root of a rounding error of about 1e-16.
        assert moments.std == pytest.approx(std, abs=1e-7)


def test_majority_probabilities_sum_to_one_for_many_votes() -> None:
    for sizes, k in [((1, 1, 2, 3, 9), 16), ((1,) * 20 + (12, 32), 64), ((5, 5), 200)]:
        win = majority_probabilities(sizes, k)
        assert math.fsum(win[size] for size in sizes) == pytest.approx(1.0, abs=1e-9)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6), st.integers(1, 6), st.data())
@settings(deadline=None, max_examples=40)
def test_a_vote_of_k_is_that_of_all_ways_to_choose_them(
    values: list[float], k: int, data: st.DataObject
) -> None:
    """In every order, since of tied answers the one that comes first wins."""
    n, k = len(values), min(k, len(values))
    predictions = data.draw(st.lists(st.sampled_from("abc"), min_size=n, max_size=n))
    orders = list(itertools.permutations(range(n), k))
    expected = sum(reference.majority_value(values, predictions, order) for order in orders) / len(orders)
    assert vote_at_k(values, predictions, k) == pytest.approx(expected, abs=1e-12)


def test_the_vote_of_all_by_hand() -> None:
    """Of three answers `a` wins; of two, `a` wins in 1 of 3 pairs and half of the other two, which are ties."""
    assert vote_at_k([1.0, 1.0, 0.0], ["a", "a", "b"], 3) == pytest.approx(1.0)
    assert vote_at_k([1.0, 1.0, 0.0], ["a", "a", "b"], 2) == pytest.approx(2 / 3)
    assert vote_at_k([0.0] * 199 + [1.0], ["x"] * 199 + ["y"], 60) == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ValueError, match="maj@3 cannot be estimated without bias from 2"):
        vote_at_k([1.0, 0.0], ["a", "b"], 3)
    with pytest.raises(ValueError, match="2 values and 1 predictions"):
        vote_at_k([1.0, 0.0], ["a"], 1)


@pytest.mark.parametrize(
    ("freedom", "quantile", "error"),
    [
        (1, 12.7062, 1e-5), (2, 4.30265, 1e-5), (3, 3.18245, 8e-3), (5, 2.570582, 1e-3), (10, 2.2281389, 3e-5),
        (20, 2.0859634, 1e-6), (50, 2.0085591, 1e-7), (1000, 1.9623391, 1e-7),
    ],
)  # fmt: skip
def test_quantiles_of_students_distribution_are_those_of_the_tables(
    freedom: int, quantile: float, error: float
) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, rel=error)


def test_no_random_state_is_touched() -> None:
    # A bootstrap would draw from, or even seed, the process-wide generator.
    before = random.getstate()
    maj_at_k([0.0, 1.0, 1.0], ["a", "b", "b"], 2)
    assert random.getstate() == before


def test_wilson_interval_by_hand() -> None:
    # 7 of 10 at z = 1.959964: center (0.7 + z^2/20) / (1 + z^2/10), the textbook's (0.3968, 0.8922).
    assert wilson_interval(7, 10) == pytest.approx((0.39677, 0.89221), abs=1e-5)


def test_wilson_interval_at_the_ends() -> None:
    # No success in n trials: high = z^2 / (n + z^2).
    z = statistics.NormalDist().inv_cdf(0.975)
    none, every = wilson_interval(0, 20), wilson_interval(20, 20)
    assert none == (0.0, pytest.approx(z**2 / (20 + z**2), abs=1e-12))
    assert every == (pytest.approx(20 / (20 + z**2), abs=1e-12), 1.0)


@given(total=st.integers(1, 500), data=st.data())
@settings(max_examples=50, deadline=None)
def test_wilson_bounds_solve_their_equation(total: int, data: st.DataObject) -> None:
    # The bounds are where (rate - p)^2 = z^2 p (1 - p) / n.
    successes = data.draw(st.integers(0, total))
    z = statistics.NormalDist().inv_cdf(0.975)
    for p in wilson_interval(successes, total):
        assert (successes / total - p) ** 2 == pytest.approx(z**2 * p * (1 - p) / total, abs=1e-12)


def test_clear_errors() -> None:
    with pytest.raises(ValueError, match="pass@5 cannot be estimated without bias from 4 samples"):
        pass_at_k(4, 1, 5)
    with pytest.raises(ValueError, match="5 of 4 samples are said to be correct"):
        pass_at_k(4, 5, 1)
    with pytest.raises(ValueError, match="2 draws from 0 values"):
        best_at_k([], 2)
    with pytest.raises(ValueError, match="values must be finite"):
        worst_at_k([0.0, math.nan], 2)
    with pytest.raises(ValueError, match="2 values and 1 predictions"):
        maj_at_k([0.0, 1.0], ["a"], 2)
    with pytest.raises(ValueError, match="1 successes in 0 trials"):
        wilson_interval(1, 0)
