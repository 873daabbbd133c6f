"""Losses without clipping: a soft gate (SAPO), a quadratic penalty (DRO)."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.losses.terms import (
    PolicyLossTerms,
    implements,
    probability_ratio,
    ratio_statistics,
)


@implements("sapo")
def sapo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> PolicyLossTerms:
    """A sigmoid of the ratio in place of a clip: the gradient fades as the ratio leaves 1.

        term = -A * sigmoid(tau * (ratio - 1)) * 4 / tau,   tau = tau_pos where A > 0, else tau_neg

    The gradient is -A * ratio * 4 * s * (1 - s) with s the sigmoid: -A at a ratio of 1, whatever tau.

    Args:
        log_probs: with gradient; any shape, that of all columns.
        tau_pos, tau_neg: how fast the gradient fades, above 0. The paper takes tau_neg the larger one.

    Returns:
        Terms, and the statistics ppo_kl and ratio.

    Source: Gao et al. 2025, arXiv:2511.20347; each response counts alike: aggregation seq-mean-token-mean.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(
            f"sapo divides by its taus: tau_pos is {tau_pos}, tau_neg {tau_neg}; use 1.0 and 1.05"
        )
    log_ratio = log_probs - old_log_probs
    ratio = probability_ratio(log_ratio)
    tau = torch.where(advantages > 0, torch.full_like(ratio, tau_pos), torch.full_like(ratio, tau_neg))
    terms = -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return PolicyLossTerms(terms=terms, statistics=ratio_statistics(log_ratio, ratio))


@implements("dro")
def dro_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, dro_beta: float = 1.0
) -> PolicyLossTerms:
    """The policy gradient with a quadratic penalty on the move: no ratio, no clip.

        term = -(A * log_probs - dro_beta / 2 * (log_probs - old_log_probs)^2)

    The penalty pulls back also where the advantage is 0.

    Args:
        log_probs: with gradient; any shape, that of all columns.
        dro_beta: weight of the penalty, in advantage per nat; above 0.

    Returns:
        Terms, and the statistics ppo_kl and ratio.

    Source: Richemond et al. 2024, arXiv:2405.19107: the policy's part of the objective, with the old policy as the
        reference and the advantage in place of reward minus value. The default of dro_beta, their temperature, is ours.
    """
    if not dro_beta > 0:
        raise ValueError(f"dro_beta is {dro_beta}, but it weighs the only bound on the step: use one above 0")
    log_ratio = log_probs - old_log_probs
    terms = -(advantages * log_probs - dro_beta / 2 * log_ratio.square())
    with torch.no_grad():
        ratio = probability_ratio(log_ratio)
    return PolicyLossTerms(terms=terms, statistics=ratio_statistics(log_ratio, ratio))
