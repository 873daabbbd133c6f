"""GMPO: the geometric mean of a response's clipped token ratios.

The row of each token is read from `row_ids`, in the padded and in the flat layout; a micro-batch must hold whole rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.kl import LOG_RATIO_BOUND
from strop.algorithms.losses.gspo import row_means
from strop.algorithms.losses.terms import (
    PolicyLossTerms,
    implements,
    probability_ratio,
    ratio_statistics,
)
from strop.algorithms.specs import PG_CLIPFRAC


@implements("gmpo", "geo_mean")
def gmpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    row_ids: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLossTerms:
    """Minus the advantage times the geometric mean of the clipped token ratios; one value per response.

        d_t    = clamp(log_probs_t - old_log_probs_t, +-20)
        c_t    = min(d_t, clip_high) where A_t > 0, max(d_t, -clip_low) where A_t < 0, 0 where A_t = 0
        term_t = -mean(A) * exp(mean(c))       for each token t of the row, means over the row's tokens

    so that the mean of a row's terms, taken by seq-mean-token-mean, is the objective of the response. The
    gradient of the sum of a row's terms at log_probs == old_log_probs is -mean(A) for each token: REINFORCE's
    where the row's advantages are equal, which is the paper's case.

    Args:
        clip_low, clip_high: ranges of the *log*-ratio: the ratio lies in [e^-clip_low, e^clip_high]. The paper
            uses 0.4 for both.
        The others as in `gspo_loss`.

    Returns:
        Terms, and the statistics pg_clipfrac (1 where c_t is not d_t), ppo_kl (per token) and ratio (that of the
        response).

    Source: Zhao et al. 2025, arXiv:2507.20673, the objective with token-level clipping. Advantages that differ within a
        row, which the paper does not have, enter by their mean.
    """
    log_ratio = log_probs - old_log_probs
    bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    clipped = torch.where(advantages > 0, bounded.clamp(max=clip_high), bounded.clamp(min=-clip_low))
    clipped = torch.where(advantages == 0, torch.zeros_like(clipped), clipped)
    ratio = probability_ratio(row_means(clipped, response_mask, row_ids))
    values = -row_means(advantages, response_mask, row_ids) * ratio
    with torch.no_grad():
        statistics = {
            PG_CLIPFRAC.last: ((clipped != bounded) & (advantages != 0)).to(ratio.dtype),
            **ratio_statistics(log_ratio, ratio),
        }
    return PolicyLossTerms(
        terms=torch.where(response_mask, values, torch.zeros_like(values)), statistics=statistics
    )
