from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from references import losses as reference
from strop.algorithms.kl import kl_penalty
from strop.algorithms.names import KL_KINDS

# One token, log-probs 0 and ln 2 apart: d = -ln 2, e^-d = 2. Gradients are by the policy's log-prob:
# 1, sign(d), d, and 1 - e^-d.
LN2 = math.log(2)
CLOSED_FORM = {
    "k1": (-LN2, 1.0),
    "abs": (LN2, -1.0),
    "k2": (LN2**2 / 2, -LN2),
    "k3": (1 - LN2, -1.0),
}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


@pytest.mark.parametrize("kind", KL_KINDS)
def test_value_and_gradient_of_each_kind(kind: str) -> None:
    base = kind.removesuffix("+")
    value, gradient = CLOSED_FORM[ALIASES.get(base, base)]
    if kind.endswith("+"):
        gradient = CLOSED_FORM["k2"][1]
    log_probs = torch.tensor([-LN2], dtype=torch.float64, requires_grad=True)
    got = kl_penalty(log_probs, torch.zeros(1, dtype=torch.float64), kind)
    got.sum().backward()
    assert got.item() == pytest.approx(value, abs=1e-12)
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(gradient, abs=1e-12)


@given(log_prob=st.floats(-60, 0), ref=st.floats(-60, 0), kind=st.sampled_from(KL_KINDS))
@settings(max_examples=100, deadline=None)
def test_kl_equals_the_reference(log_prob: float, ref: float, kind: str) -> None:
    got = kl_penalty(
        torch.tensor(log_prob, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64), kind
    )
    assert got.item() == pytest.approx(reference.kl(log_prob, ref, kind.removesuffix("+")), abs=1e-10)


def test_a_rounding_of_equal_log_probs_gives_no_direction() -> None:
    log_probs = torch.tensor([1e-7, -1e-7, 1e-4, -1e-4], dtype=torch.float64, requires_grad=True)
    got = kl_penalty(log_probs, torch.zeros(4, dtype=torch.float64), "abs")
    got.sum().backward()
    assert got.tolist() == [1e-7, 1e-7, 1e-4, 1e-4]
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [0.0, 0.0, 1.0, -1.0]


def test_k3_keeps_its_digits_for_small_differences_in_float32() -> None:
    # For small d, k3 = d^2 / 2. With exp(d) - 1 in float32 the rounding (6e-8) would exceed the value (5e-9).
    difference = torch.tensor([1e-4, -1e-4, 3e-5])
    got = kl_penalty(difference, torch.zeros(3), "k3")
    torch.testing.assert_close(got, difference.square() / 2, rtol=5e-3, atol=0)


def test_k3_is_bounded_for_an_outlier() -> None:
    got = kl_penalty(torch.tensor([-200.0, 0.0]), torch.tensor([0.0, -200.0]), "k3")
    assert got.tolist() == [10.0, 10.0]


def test_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'full'; known: k1, kl, abs"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "full")
