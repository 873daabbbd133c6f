"""DPPO: REINFORCE under a truncated importance weight, without tokens that moved too far.

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
from strop.algorithms.specs import PG_CLIPFRAC, PG_CLIPFRAC_LOWER

BINARY_KL_EPS = 1e-8
"""Added to the probability of all other tokens, so that its logarithm is finite for a sure token."""


@implements("dppo_tv")
def dppo_tv_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    truncation: float = 20.0,
) -> PolicyLossTerms:
    """REINFORCE under a truncated importance weight, without tokens that moved too far in total variation.

        term = -v * sg(min(ratio, truncation)) * A * log_probs
        v    = 1 where p - p_old <= clip_high (A > 0) or p - p_old >= -clip_low (A <= 0), else 0

    with p = exp(log_probs): |p - p_old| is the total variation between "this token or another one".

    Args:
        log_probs: with gradient; any shape, that of all columns.
        clip_low, clip_high: largest move of the *probability* down and up.
        truncation: largest importance weight; above 0.

    Returns:
        Terms, and the statistics pg_clipfrac (1 where v is 0), pg_clipfrac_lower (1 where the truncation acts),
        ppo_kl and ratio.

    Source: Qi et al. 2026, arXiv:2602.04879, binary total variation.
    """
    with torch.no_grad():
        moved = log_probs.exp() - old_log_probs.exp()
        inside = torch.where(advantages > 0, moved <= clip_high, moved >= -clip_low)
    return _trust_region_terms(log_probs, old_log_probs, advantages, inside=inside, truncation=truncation)


@implements("dppo_kl")
def dppo_kl_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    truncation: float = 20.0,
) -> PolicyLossTerms:
    """As `dppo_tv_loss`, with the KL divergence between "this token or another one" as the distance.

        kl = p_old * (old_log_probs - log_probs)
             + (1 - p_old) * log((1 - p_old + 1e-8) / (1 - p + 1e-8))
        v  = 1 where kl <= clip_high or p <= p_old (A > 0), kl <= clip_low or p >= p_old (A <= 0), else 0

    A token that moved far against its advantage keeps its gradient, which leads it back.

    Args:
        clip_low, clip_high: largest divergence, in nats, for tokens of negative and of positive advantage.
        The others, and the statistics, as in `dppo_tv_loss`.

    Source: Qi et al. 2026, arXiv:2602.04879, binary KL.
    """
    with torch.no_grad():
        # Rounding may leave a log-prob a little above 0.
        p, p_old = log_probs.exp().clamp(max=1), old_log_probs.exp().clamp(max=1)
        log_ratio_of_rest = torch.log((1 - p_old + BINARY_KL_EPS) / (1 - p + BINARY_KL_EPS))
        kl = p_old * (old_log_probs - log_probs) + (1 - p_old) * log_ratio_of_rest
        inside = torch.where(
            advantages > 0, (kl <= clip_high) | (p <= p_old), (kl <= clip_low) | (p >= p_old)
        )
    return _trust_region_terms(log_probs, old_log_probs, advantages, inside=inside, truncation=truncation)


def _trust_region_terms(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, inside: Tensor, truncation: float
) -> PolicyLossTerms:
    if not truncation > 0:
        raise ValueError(
            f"the truncation of the importance weight is {truncation}; use a number above 0, usually 20"
        )
    log_ratio = log_probs - old_log_probs
    with torch.no_grad():
        ratio = probability_ratio(log_ratio)
        weight = ratio.clamp(max=truncation) * inside
        statistics = {
            PG_CLIPFRAC.last: (~inside).to(ratio.dtype),
            PG_CLIPFRAC_LOWER.last: (inside & (ratio > truncation)).to(ratio.dtype),
            **ratio_statistics(log_ratio, ratio),
        }
    return PolicyLossTerms(terms=-weight * advantages * log_probs, statistics=statistics)
