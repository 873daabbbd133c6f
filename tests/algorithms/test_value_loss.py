"""The critic's loss per token, and the variance that values explain."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from references import critics as reference
from references.losses import reduce_terms
from strop.algorithms.aggregation import batch_totals, token_weights, weighted_sum
from strop.algorithms.losses.value import ExplainedVariance, explained_variance, value_loss_terms
from strop.utils.metrics import Mean, merge_metrics, metric_values


def double(values: object, *, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def test_terms_by_hand() -> None:
    # Range 1/2 around the old value 1. Target 3.
    #   v = 1.2: within the range; (1.8)^2 / 2 = 1.62.
    #   v = 2.0: clipped to 1.5, farther from the target: (1.5)^2 / 2 = 1.125, not (1)^2 / 2.
    #   v = 0.0: clipped to 0.5, nearer to the target: the plain error counts, 9 / 2 = 4.5.
    values = double([1.2, 2.0, 0.0], grad=True)
    loss = value_loss_terms(
        values, double([1.0] * 3), double([3.0] * 3), mask=torch.ones_like(values), clip_range=0.5
    )
    torch.testing.assert_close(loss.terms, double([1.62, 1.125, 4.5]))
    assert loss.statistics["vf_clipfrac"].tolist() == [0.0, 1.0, 0.0]
    assert loss.statistics["vpred_mean"].tolist() == [1.2, 2.0, 0.0]
    loss.terms.sum().backward()
    # d/dv (v - G)^2 / 2 = v - G, and nothing where the clipped error won.
    torch.testing.assert_close(values.grad, double([-1.8, 0.0, -3.0]))


@given(
    rows=st.lists(
        st.tuples(*[st.floats(-3, 3, allow_subnormal=False) for _ in range(3)]), min_size=1, max_size=6
    ),
    clip_range=st.sampled_from([0.1, 0.5, math.inf]),
)
@settings(max_examples=60, deadline=None)
def test_terms_equal_the_reference(rows: list[tuple[float, float, float]], clip_range: float) -> None:
    values, old, returns = (double(column) for column in zip(*rows, strict=True))
    loss = value_loss_terms(values, old, returns, mask=torch.ones_like(values), clip_range=clip_range)
    expected = [reference.value_term(*row, clip_range) for row in rows]
    torch.testing.assert_close(loss.terms, double([term for term, _ in expected]), rtol=1e-12, atol=1e-12)
    if clip_range == math.inf:
        assert not loss.statistics["vf_clipfrac"].any()
        torch.testing.assert_close(loss.terms, (values - returns).square() / 2)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_weighted_terms_of_any_cut_add_up_to_the_loss_of_the_batch(mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]]).bool()
    values, old, returns = (torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    totals = batch_totals(mask)

    def loss(rows: slice) -> float:
        weights = token_weights(
            mode, mask[rows], num_tokens=totals.num_tokens, num_samples=totals.num_samples
        )
        terms = value_loss_terms(values[rows], old[rows], returns[rows], mask=mask[rows], clip_range=0.3)
        return float(weighted_sum(terms.terms, weights.double()))

    whole = [
        [reference.value_term(*token, 0.3)[0] for token in zip(*row, strict=True)]
        for row in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True)
    ]
    expected = reduce_terms(whole, mask.int().tolist(), mode)
    assert loss(slice(0, 4)) == pytest.approx(expected, rel=1e-6)
    assert loss(slice(0, 1)) + loss(slice(1, 4)) == pytest.approx(loss(slice(0, 4)), rel=1e-12)


def test_nothing_outside_the_mask_reaches_loss_or_gradient() -> None:
    mask = torch.tensor([1, 0, 1]).bool()
    values = double([1.0, math.nan, 2.0], grad=True)
    loss = value_loss_terms(
        values, double([1.0, math.inf, 2.0]), double([0.0, math.nan, 0.0]), mask=mask, clip_range=0.5
    )
    weighted_sum(loss.terms, mask.double()).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 0.0, 2.0]


numbers = st.lists(
    st.tuples(st.floats(-100, 100, width=32), st.floats(-100, 100, width=32)), min_size=2, max_size=20
)


@given(pairs=numbers, cut=st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_explained_variance_of_parts_merges_to_that_of_all(
    pairs: list[tuple[float, float]], cut: int
) -> None:
    values, returns = (list(column) for column in zip(*pairs, strict=True))
    if max(returns) - min(returns) < 1e-2:
        return
    everything = torch.ones(len(pairs)).bool()
    cut = min(cut, len(pairs))
    parts = [
        explained_variance(double(values[part]), double(returns[part]), everything[part])
        for part in (slice(0, cut), slice(cut, None))
    ]
    expected = reference.explained_variance(values, returns)
    tolerance = {"rel": 1e-9, "abs": 1e-9}
    assert parts[0].merge(parts[1]).value == pytest.approx(expected, **tolerance)
    assert parts[1].merge(parts[0]).value == pytest.approx(expected, **tolerance)
    whole = explained_variance(double(values), double(returns), everything)
    assert whole.value == pytest.approx(expected, **tolerance)


def test_a_perfect_critic_explains_all_and_a_constant_nothing() -> None:
    returns, mask = double([1.0, 2.0, 6.0, math.nan]), torch.tensor([1, 1, 1, 0])
    assert explained_variance(returns, returns, mask).value == 1.0
    assert explained_variance(double([5.0, 5.0, 5.0, 0.0]), returns, mask).value == pytest.approx(
        0.0, abs=1e-12
    )


def test_returns_that_do_not_vary_have_no_explained_variance() -> None:
    constant = explained_variance(double([0.0, 1.0]), double([1.0, 1.0]), torch.ones(2))
    assert math.isnan(constant.value)
    assert metric_values({"a": constant, "b": ExplainedVariance(), "c": Mean(2.0, 1)}) == {"c": 2.0}
    with pytest.raises(ValueError, match="reported as ExplainedVariance by one part and as Mean"):
        merge_metrics([{"a": constant}, {"a": Mean(1.0, 1)}])
