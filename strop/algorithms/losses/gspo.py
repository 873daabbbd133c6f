"""GSPO: the ratio belongs to a whole response, and is the geometric mean of its token ratios.

The row of each token is read from `row_ids`, in the padded and in the flat layout; a micro-batch must hold whole rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.algorithms.kl import LOG_RATIO_BOUND
from strop.algorithms.losses.terms import (
    PolicyLossTerms,
    clipped_surrogate,
    implements,
    ratio_statistics,
)
from strop.algorithms.specs import PG_CLIPFRAC

SEQUENCE_LOG_RATIO_MAX = 10.0
"""Largest mean log-ratio of a response that GSPO exponentiates; nothing else bounds the ratio of a response with a
negative advantage."""


def row_means(values: Tensor, response_mask: Tensor, row_ids: Tensor) -> Tensor:
    """The mean over the masked-in tokens of a row, at each of its tokens; 0 in a row without such tokens.

    The tokens of a row are added one after another, so that the same call gives the same bits on every device; adding
    them where they fall (index_add) leaves the order to a GPU's scheduler.

    Args:
        values: [B, R] or [N]; finite outside the mask.
        response_mask: same shape, true on tokens that count.
        row_ids: same shape, int64, the row of each token, counted from 0.
    """
    rows, valid = row_ids.reshape(-1), response_mask.reshape(-1)
    if not rows.numel():
        return torch.zeros_like(values)
    # Rows are numbered anew, 0 .. M - 1 at most: what asks for their number would wait for the device.
    order = rows.argsort(stable=True)
    starts = F.pad(rows[order].diff() != 0, (1, 0))
    row = starts.cumsum(0)  # [M], of each token in this order
    masked = torch.where(valid, values.reshape(-1), torch.zeros_like(values.reshape(-1)))[order]
    zeros = torch.zeros_like(row)
    lengths, count = zeros.index_add(0, row, zeros + 1), zeros.index_add(0, row, valid[order].to(row))
    total = torch.segment_reduce(masked, "sum", lengths=lengths, initial=0.0, unsafe=True)
    means = (total / count.clamp(min=1))[row]
    return torch.empty_like(means).index_put((order,), means).reshape(values.shape)


@implements("gspo", "gspo_token")
def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    row_ids: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLossTerms:
    """The clipped surrogate of the response's ratio, one term per token.

        log s_i = mean over the row's tokens of (log_probs - old_log_probs), clamped to [-20, 10]
        ratio_t = s_i * exp(log_probs_t - sg(log_probs_t))         (value s_i, gradient of token t alone)
        term_t  = max(-A_t * ratio_t, -A_t * clamp(ratio_t, 1 - clip_low, 1 + clip_high))

    Where the advantages of a row are equal this is GSPO in value and in gradient, under any aggregation mode;
    where they differ, it is GSPO-token. So the paper's two losses are one function under two names.

    Args:
        log_probs: with gradient; [B, R] or [N], as all columns.
        response_mask: true on tokens trained on; a row's mean is over these.
        row_ids: int64, the row of each token.
        clip_low, clip_high: around a ratio of 1. The ratio of a response moves far less than that of a token:
            the paper uses 3e-4 and 4e-4, and the 0.2 of PPO would never clip.

    Returns:
        Terms, and the statistics pg_clipfrac (1 where the clipped side won), ppo_kl (per token) and ratio (that
        of the response).

    Source: Zheng et al. 2025, arXiv:2507.18071, eq. 5 and 7 (GSPO), eq. 13 and 14 (GSPO-token); its sum over a
        row is divided by the row's length: aggregation seq-mean-token-mean. The clamps are ours.
    """
    log_ratio = log_probs - old_log_probs
    # log_probs - sg(log_probs) is 0 in value; the log-prob's own gradient enters through it.
    row_log_ratio = row_means(log_ratio.detach(), response_mask, row_ids) + (log_probs - log_probs.detach())
    ratio = row_log_ratio.clamp(-LOG_RATIO_BOUND, SEQUENCE_LOG_RATIO_MAX).exp()
    surrogate, is_clipped = clipped_surrogate(advantages, ratio, clip_low, clip_high)
    with torch.no_grad():
        statistics = {
            PG_CLIPFRAC.last: is_clipped.to(ratio.dtype),
            **ratio_statistics(log_ratio, ratio),
        }
    return PolicyLossTerms(terms=surrogate, statistics=statistics)
