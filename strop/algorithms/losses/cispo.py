"""CISPO: the ratio, bounded, is a number without gradient that weighs log-probs.

    term_t = -weight_t * A_t * log_probs_t

The value of such a term is not an estimate of anything; its gradient is what counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.losses.terms import (
    PolicyLossTerms,
    implements,
    probability_ratio,
    ratio_statistics,
)
from strop.algorithms.specs import PG_CLIPFRAC


@implements("cispo")
def cispo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLossTerms:
    """REINFORCE under a clipped importance weight: no token loses its gradient.

        term = -sg(clamp(ratio, 1 - clip_low, 1 + clip_high)) * A * log_probs

    Args:
        log_probs: with gradient; any shape, that of all columns.
        clip_low, clip_high: around a ratio of 1. The paper sets no lower bound (clip_low from 1 up) and tunes
            the upper one.

    Returns:
        Terms, and the statistics pg_clipfrac (1 where the weight is not the ratio), ppo_kl and ratio.

    Source: MiniMax 2025, arXiv:2506.13585, eq. 4 and 5; its mean is over all tokens: token-mean.
    """
    log_ratio = log_probs - old_log_probs
    with torch.no_grad():
        ratio = probability_ratio(log_ratio)
        weight = ratio.clamp(1 - clip_low, 1 + clip_high)
        statistics = {
            PG_CLIPFRAC.last: (weight != ratio).to(ratio.dtype),
            **ratio_statistics(log_ratio, ratio),
        }
    return PolicyLossTerms(terms=-weight * advantages * log_probs, statistics=statistics)
