"""Per-token estimators of the KL divergence from the policy to a reference model."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.names import KL_KINDS

LOG_RATIO_BOUND = 20.0
"""Largest |log-ratio| that is exponentiated; e^20 = 5e8 keeps float32 finite."""
ROUNDING = 1e-5
"""Difference of two log-probs, in nats, that rounding may make of none."""
K3_BOUND = 10.0
"""Largest value of one token under k3; beyond it the token is an outlier without gradient."""


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, kind: str) -> Tensor:
    """Estimate of KL(policy || reference) at each sampled token, in nats; elementwise on any shape.

    With d = log_probs - ref_log_probs:

        k1, kl            d                     unbiased, can be negative
        abs               |d|
        k2, mse           d^2 / 2               biased, its gradient is that of the divergence
        k3, low_var_kl    e^-d + d - 1          unbiased and never negative; clamped

    A final `+` keeps the value and takes the gradient of k2. As a loss, the plain k1 has a gradient whose
    expectation is zero; use it for measuring, or as `k1+`.

    Raises:
        ValueError: unknown kind.

    Source: Schulman 2020, "Approximating KL divergence"; the clamps (20, then 10) are those in common use.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"unknown KL estimator {kind!r}; known: {', '.join(KL_KINDS)}")
    difference = log_probs - ref_log_probs
    value = _estimate(difference, kind.removesuffix("+"))
    if not kind.endswith("+"):
        return value
    k2 = difference.square() / 2
    return value.detach() + (k2 - k2.detach())


def distance(difference: Tensor) -> Tensor:
    """|difference| of log-probs; without gradient up to ROUNDING, where its sign would be that of a rounding."""
    size = difference.abs()
    return torch.where(size > ROUNDING, size, size.detach())


def _estimate(difference: Tensor, base: str) -> Tensor:
    if base in ("k1", "kl"):
        return difference
    if base == "abs":
        return distance(difference)
    if base in ("k2", "mse"):
        return difference.square() / 2
    bounded = (-difference).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    # expm1 keeps the digits that e^x - 1 loses for the tiny differences of an on-policy step.
    return (torch.expm1(bounded) - bounded).clamp(-K3_BOUND, K3_BOUND)
