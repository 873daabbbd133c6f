"""PPO's clipped surrogate."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.losses.terms import (
    PolicyLossTerms,
    clipped_surrogate,
    implements,
    probability_ratio,
    ratio_statistics,
)
from strop.algorithms.specs import PG_CLIPFRAC, PG_CLIPFRAC_LOWER


@implements("vanilla")
def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLossTerms:
    """PPO's clipped surrogate with separate clip ranges and a cap for negative advantages (dual clip).

    With ratio = exp(clamp(log_probs - old_log_probs, +-20)):

        clipped(A) = max(-A * ratio, -A * clamp(ratio, 1 - clip_low, 1 + clip_high))
        term       = clipped(A) where A >= 0, else min(clipped(A), -A * clip_c)

    Args:
        log_probs: current policy, with gradient; any shape.
        old_log_probs: the policy at the start of the step; same shape, as are the advantages.
        clip_low, clip_high: clip ranges below and above a ratio of 1.
        clip_c: cap on the ratio where the advantage is negative; above 1.

    Returns:
        Terms, and the statistics pg_clipfrac (1 where the clipped side won), pg_clipfrac_lower (1 where
        the cap won), ppo_kl (old_log_probs - log_probs, not clamped) and ratio.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; asymmetric ranges: Yu et al. 2025,
        arXiv:2503.14476; dual clip: Ye et al. 2020, arXiv:1912.09729.
    """
    log_ratio = log_probs - old_log_probs
    ratio = probability_ratio(log_ratio)
    surrogate, is_clipped = clipped_surrogate(advantages, ratio, clip_low, clip_high)
    cap = -advantages * clip_c
    is_negative = advantages < 0
    terms = torch.where(is_negative, torch.minimum(surrogate, cap), surrogate)
    with torch.no_grad():
        statistics = {
            PG_CLIPFRAC.last: is_clipped.to(ratio.dtype),
            PG_CLIPFRAC_LOWER.last: (is_negative & (surrogate > cap)).to(ratio.dtype),
            **ratio_statistics(log_ratio, ratio),
        }
    return PolicyLossTerms(terms=terms, statistics=statistics)
