from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from references import losses as reference
from strop.algorithms.losses import (
    POLICY_LOSS_REGISTRY,
    PolicyLossTerms,
    get_policy_loss_fn,
    policy_loss_terms,
    register_policy_loss,
)
from strop.algorithms.losses.clipped import clipped_policy_loss
from strop.algorithms.specs import policy_loss_declaration

CLIP = {"clip_low": 0.2, "clip_high": 0.3, "clip_c": 3.0}


@pytest.fixture
def scratch_registry() -> Iterator[None]:
    before = dict(POLICY_LOSS_REGISTRY)
    declared = dict(POLICY_LOSS_REGISTRY.declarations)
    yield
    POLICY_LOSS_REGISTRY.clear()
    POLICY_LOSS_REGISTRY.update(before)
    POLICY_LOSS_REGISTRY.declarations.clear()
    POLICY_LOSS_REGISTRY.declarations.update(declared)


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_clipped_loss_in_each_region() -> None:
    # Ranges 0.8 .. 1.3, cap 3. Columns: (ratio, A) -> term, clip won, cap won.
    #   (1.0,  2): -2                   (1.5,  1): -1.3, clipped      (0.5,  1): -0.5, the worse side stays
    #   (0.5, -1):  0.8, clipped        (1.5, -1):  1.5               (4.0, -1):  3, capped
    ratios, advantages = double([1.0, 1.5, 0.5, 0.5, 1.5, 4.0]), double([2.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    got = clipped_policy_loss(ratios.log(), torch.zeros_like(ratios), advantages, **CLIP)
    torch.testing.assert_close(got.terms, double([-2.0, -1.3, -0.5, 0.8, 1.5, 3.0]))
    assert got.statistics["pg_clipfrac"].tolist() == [0, 1, 0, 1, 0, 0]
    assert got.statistics["pg_clipfrac_lower"].tolist() == [0, 0, 0, 0, 0, 1]
    torch.testing.assert_close(got.statistics["ppo_kl"], -ratios.log())
    torch.testing.assert_close(got.statistics["ratio"], ratios)


def test_gradient_is_the_policy_gradient_at_ratio_one_and_zero_where_clipped() -> None:
    log_probs = double([0.0, math.log(1.5), math.log(4.0)]).requires_grad_()
    got = clipped_policy_loss(log_probs, double([0.0, 0.0, 0.0]), double([2.0, 1.0, -1.0]), **CLIP)
    got.terms.sum().backward()
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, double([-2.0, 0.0, 0.0]))


def test_an_unmoved_policy_has_ratio_one_no_kl_and_no_clipping() -> None:
    log_probs = torch.randn(50, generator=torch.Generator().manual_seed(0))
    advantages = torch.randn(50, generator=torch.Generator().manual_seed(1))
    got = clipped_policy_loss(log_probs, log_probs, advantages, **CLIP)
    assert torch.equal(got.terms, -advantages)
    assert {name: values.unique().tolist() for name, values in got.statistics.items()} == {
        "pg_clipfrac": [0.0],
        "pg_clipfrac_lower": [0.0],
        "ppo_kl": [0.0],
        "ratio": [1.0],
    }


def test_huge_log_ratios_stay_finite_and_are_logged_before_the_clamp() -> None:
    log_probs = torch.tensor([0.0, -1e4], requires_grad=True)
    got = clipped_policy_loss(log_probs, torch.tensor([-1e4, 0.0]), torch.tensor([-1.0, 1.0]), **CLIP)
    got.terms.sum().backward()
    assert torch.isfinite(got.terms).all()
    assert log_probs.grad is not None
    assert torch.isfinite(log_probs.grad).all()
    assert got.statistics["ppo_kl"].tolist() == [-1e4, 1e4]
    torch.testing.assert_close(got.statistics["ratio"], torch.tensor([math.exp(20), math.exp(-20)]))


@given(
    rows=st.lists(
        st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.sampled_from([-2.5, -1.0, 0.0, 0.5, 3.0])),
        min_size=1,
        max_size=12,
    ),
    low=st.sampled_from([0.0, 0.2, 1.0]),
    high=st.sampled_from([0.0, 0.28, 5.0]),
)
@settings(max_examples=80, deadline=None)
def test_clipped_loss_equals_the_reference(
    rows: list[tuple[float, float, float]], low: float, high: float
) -> None:
    log_probs, old, advantages = (double(column) for column in zip(*rows, strict=True))
    got = clipped_policy_loss(log_probs, old, advantages, clip_low=low, clip_high=high, clip_c=3.0)
    expected = [reference.clipped_term(*row, low, high, 3.0) for row in rows]
    torch.testing.assert_close(got.terms, double([e[0] for e in expected]), rtol=1e-10, atol=1e-10)
    assert got.statistics["pg_clipfrac"].bool().tolist() == [e[1] for e in expected]
    assert got.statistics["pg_clipfrac_lower"].bool().tolist() == [e[2] for e in expected]


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_tokens_never_matter(junk: float) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    generator = torch.Generator().manual_seed(0)
    clean = [torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(3)]
    results = []
    for fill in (0.0, junk):
        columns = {
            name: torch.where(mask.bool(), values, fill)
            for name, values in zip(("log_probs", "old_log_probs", "advantages"), clean, strict=True)
        }
        columns["log_probs"].requires_grad_()
        got = policy_loss_terms("vanilla", mask=mask, columns=columns, settings=CLIP)
        (got.terms * mask).sum().backward()
        results.append((got, columns["log_probs"].grad))
    (without, gradient), (with_junk, gradient_with_junk) = results
    assert torch.equal(without.terms, with_junk.terms)
    assert gradient is not None
    assert torch.equal(gradient, gradient_with_junk)
    assert (gradient[mask == 0] == 0).all()
    for name, values in without.statistics.items():
        assert torch.equal(values, with_junk.statistics[name]), name


def test_masked_tokens_get_no_gradient_also_when_summed_without_the_mask() -> None:
    columns = {name: torch.zeros(3) for name in ("log_probs", "old_log_probs", "advantages")}
    columns["advantages"] += 1.0
    columns["log_probs"].requires_grad_()
    got = policy_loss_terms("vanilla", mask=torch.tensor([1, 0, 1]), columns=columns, settings=CLIP)
    got.terms.sum().backward()
    assert columns["log_probs"].grad is not None
    assert columns["log_probs"].grad.tolist() == [-1.0, 0.0, -1.0]


def test_a_missing_column_is_named() -> None:
    with pytest.raises(ValueError, match="'vanilla' needs the columns advantages, old_log_probs, but"):
        policy_loss_terms("vanilla", mask=torch.ones(1), columns={"log_probs": torch.zeros(1)}, settings=CLIP)


def test_unknown_loss_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown policy loss 'ppo'; known: cispo, clip_cov, .*vanilla"):
        get_policy_loss_fn("ppo")


@pytest.mark.usefixtures("scratch_registry")
def test_a_loss_of_ones_own_gets_exactly_what_it_declares_and_may_replace_a_name() -> None:
    @register_policy_loss("mine", needs=["log_probs", "advantages"], settings=["beta"])
    def mine(*, log_probs: Tensor, advantages: Tensor, beta: float) -> PolicyLossTerms:
        return PolicyLossTerms(terms=-beta * log_probs * advantages, statistics={})

    columns = {"log_probs": double([1.0]), "advantages": double([3.0]), "values": double([7.0])}
    got = policy_loss_terms("mine", mask=torch.ones(1), columns=columns, settings={"beta": 2.0, "other": 1.0})
    assert got.terms.tolist() == [-6.0]
    assert policy_loss_declaration("mine").settings == {"beta"}

    @register_policy_loss("mine")
    def bare() -> PolicyLossTerms:
        raise AssertionError("never called")

    assert get_policy_loss_fn("mine") is bare
    with pytest.raises(ValueError, match="'mine' declares no columns: register it with"):
        policy_loss_terms("mine", mask=torch.ones(1), columns=columns, settings={})
