"""Metric values that merge: over nothing, over one, and in any order."""

from __future__ import annotations

import math

import pytest
import torch

from strop.algorithms.losses.value import ExplainedVariance, explained_variance, value_loss_terms
from strop.utils.metrics import Max, Mean, Min, Reduction, merge_metrics, metric_values


def test_a_mean_over_nothing_is_neutral() -> None:
    assert Mean(3.0, 2).merge(Mean(0.0, 0)) == Mean(3.0, 2)
    assert Mean(3.0, 0.5).value == 6.0
    assert math.isnan(Mean(0.0, 0.0).value)
    assert Mean(-3.0, 1).value == -3.0


def test_a_count_may_be_0_and_not_below() -> None:
    assert Mean(0.0, 0).count == 0
    for count in (-1, -1e-9):
        with pytest.raises(ValueError, match="a count is at least 0"):
            Mean(0.0, count)


@pytest.mark.parametrize(("rule", "value"), [(Max, 2.0), (Min, -3.0)])
def test_extremes_of_both_signs(rule: type[Max], value: float) -> None:
    for left, right in ((2.0, -3.0), (-3.0, 2.0)):
        assert rule(left).merge(rule(right)) == rule(value)


def test_nan_on_either_side_of_an_extreme_stays() -> None:
    for rule in (Max, Min):
        for left, right in ((math.nan, 1.0), (1.0, math.nan), (math.nan, math.nan)):
            assert math.isnan(rule(left).merge(rule(right)).value)


# Returns 1, 2, 6 and values 1, 1, 3: errors 0, 1, 3. Returns have mean 3 and squares 4 + 1 + 9 = 14, errors mean 4/3
# and squares 16/9 + 1/9 + 25/9 = 14/3, so 1 - (14/3) / 14 = 2/3.
RETURNS, VALUES = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1.0, 1.0, 3.0])


def test_explained_variance_by_hand() -> None:
    got = explained_variance(VALUES, RETURNS, torch.ones(3))
    assert got.count == 3
    assert (got.return_mean, got.return_squares) == pytest.approx((3.0, 14.0))
    assert (got.error_mean, got.error_squares) == pytest.approx((4 / 3, 14 / 3))
    assert got.value == pytest.approx(2 / 3)


@pytest.mark.parametrize("masks", [([1, 0, 0], [0, 1, 1]), ([1, 1, 0], [0, 0, 1]), ([0, 0, 0], [1, 1, 1])])
def test_explained_variance_of_parts_is_that_of_the_whole(masks: tuple[list[int], list[int]]) -> None:
    left, right = (explained_variance(VALUES, RETURNS, torch.tensor(mask)) for mask in masks)
    whole = explained_variance(VALUES, RETURNS, torch.ones(3))
    for merged in (left.merge(right), right.merge(left)):
        assert merged.count == 3
        for name in ("return_mean", "return_squares", "error_mean", "error_squares", "value"):
            assert getattr(merged, name) == pytest.approx(getattr(whole, name)), name


def test_explained_variance_of_nothing() -> None:
    nothing = explained_variance(VALUES, RETURNS, torch.zeros(3))
    assert nothing == ExplainedVariance() == nothing.merge(nothing)
    assert (nothing.count, nothing.return_mean, nothing.return_squares) == (0, 0.0, 0.0)
    assert (nothing.error_mean, nothing.error_squares) == (0.0, 0.0)
    assert math.isnan(nothing.value)


def test_explained_variance_takes_no_gradient_along() -> None:
    values, returns = VALUES.clone().requires_grad_(), RETURNS.clone().requires_grad_()
    assert explained_variance(values, returns, torch.ones(3)).value == pytest.approx(2 / 3)
    loss = value_loss_terms(values, VALUES, RETURNS, mask=torch.ones_like(values), clip_range=0.5)
    assert not any(statistic.requires_grad for statistic in loss.statistics.values())


def test_what_is_over_nothing_is_left_out_and_only_that() -> None:
    metrics: dict[str, Reduction] = {
        "none": Mean(0.0, 0),
        "one": Mean(0.0, 1),
        "flat": ExplainedVariance(count=3, return_mean=1.0),
        "varied": ExplainedVariance(count=3, return_squares=2.0, error_squares=1.0),
        "max": Max(0.0),
        "min": Min(0.0),
    }
    assert metric_values(metrics) == {"one": 0.0, "varied": 0.5, "max": 0.0, "min": 0.0}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (Mean(1.0, 1), Max(1.0)),
        (Max(1.0), Min(1.0)),
        (ExplainedVariance(), Mean(1.0, 1)),
        (Min(1.0), Mean(1.0, 1)),
    ],
)
def test_any_two_rules_under_one_key_are_refused(left: Reduction, right: Reduction) -> None:
    for one, other in ((left, right), (right, left)):
        message = (
            f"'a' is reported as {type(one).__name__} by one part and as {type(other).__name__} by another"
        )
        with pytest.raises(ValueError, match=message):
            merge_metrics([{"a": one}, {"a": other}])


def test_every_rule_merges_with_itself() -> None:
    pairs: list[tuple[Reduction, Reduction]] = [
        (Mean(1.0, 1), Mean(3.0, 1)),
        (Max(1.0), Max(3.0)),
        (Min(1.0), Min(3.0)),
        (ExplainedVariance(count=1, return_mean=1.0), ExplainedVariance(count=1, return_mean=3.0)),
    ]
    merged = [merge_metrics([{"a": left}, {}, {"a": right}])["a"] for left, right in pairs]
    assert merged[:3] == [Mean(4.0, 2), Max(3.0), Min(1.0)]
    assert isinstance(merged[3], ExplainedVariance)
    assert (merged[3].count, merged[3].return_mean, merged[3].return_squares) == (2, 2.0, 2.0)


def test_a_value_at_the_edge_of_its_range_is_not_clipped() -> None:
    # Old value 1, range 1/2, target 3: 1.5 is the edge itself.
    edge = torch.tensor([1.5, 0.5], dtype=torch.float64, requires_grad=True)
    old, target = torch.ones(2, dtype=torch.float64), torch.full((2,), 3.0, dtype=torch.float64)
    loss = value_loss_terms(edge, old, target, mask=torch.ones_like(edge), clip_range=0.5)
    assert loss.terms.tolist() == [1.125, 3.125]
    assert loss.statistics["vf_clipfrac"].tolist() == [0.0, 0.0]


def test_critics_see_zeros_outside_the_mask() -> None:
    mask = torch.tensor([1, 0])
    loss = value_loss_terms(
        torch.tensor([2.0, math.nan]),
        torch.tensor([2.0, math.inf]),
        torch.tensor([1.0, 9.0]),
        mask=mask,
        clip_range=1,
    )
    assert loss.terms.tolist() == [0.5, 0.0]
    assert loss.statistics["vpred_mean"].tolist() == [2.0, 0.0]


def test_a_small_variance_of_returns_is_one_too() -> None:
    assert ExplainedVariance(count=2, return_squares=0.5, error_squares=0.125).value == 0.75
    assert ExplainedVariance(count=2, return_squares=1.0, error_squares=2.0).value == -1.0
