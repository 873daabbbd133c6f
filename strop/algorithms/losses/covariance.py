"""Losses against the collapse of entropy: Clip-Cov and KL-Cov.

A token whose log-prob and advantage are both far above their means takes entropy away. Both losses choose a few
tokens by this covariance. The means, and the choice, are those of the whole optimizer batch over all ranks, made
once by `prepare_columns`; they do not depend on micro-batches.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.algorithms.kl import distance
from strop.algorithms.losses.terms import (
    PolicyLossTerms,
    clipped_surrogate,
    implements,
    probability_ratio,
    ratio_statistics,
)
from strop.algorithms.masked_ops import masked_mean
from strop.algorithms.specs import PG_CLIPFRAC
from strop.utils.metrics import Metric
from strop.utils.rng import random_key, uniforms

COV_CLIPFRAC = Metric("actor/cov_clipfrac", "share", "tokens that clip_cov drew, of trained ones")
KL_COV_FRAC = Metric("actor/kl_cov_frac", "share", "tokens that kl_cov penalises, of trained ones")

_ODD_1 = np.uint64(0xFF51AFD7ED558CCD)
_ODD_2 = np.uint64(0xC4CEB9FE1A85EC53)
"""Odd multipliers that spread two numbers over one 64-bit key."""
_GRAIN = 2.0**-10
"""To which numbers are rounded before: another cut into passes changes their last bits."""


def token_covariances(log_probs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """(A - mean A) * (log_probs - mean log_probs) per token, means over the mask; any shape.

    Source: Cui et al. 2025, arXiv:2505.22617, eq. 10.
    """
    centered = [values - masked_mean(values, response_mask) for values in (advantages, log_probs)]
    return centered[0] * centered[1]


def select_clip_cov(
    *,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """`cov_selected` [N] bool: tokens drawn at random among those of high covariance.

    Of the tokens with clip_cov_lb < covariance < clip_cov_ub that PPO's clip leaves alone, max(1, floor(ratio *
    N)) are drawn, or all if there are fewer; N counts the tokens trained on. A draw depends on `seed` and on the
    token's old log-prob and advantage, both rounded, which are fixed for the step, and not on where the token lies or
    on other random numbers; tokens equal in both are told apart by their order.

    Args:
        log_probs, old_log_probs, advantages: [N], all tokens of the optimizer batch.
        response_mask: [N], true on tokens trained on.
        clip_cov_ratio: share of the tokens that are drawn.
        clip_cov_lb, clip_cov_ub: bounds of the covariance, in advantage times nats.
        seed: of the draw.

    Source: Cui et al. 2025, arXiv:2505.22617, eq. 11, and its values 2e-4, 1 and 5.
    """
    ratio = probability_ratio(log_probs - old_log_probs)
    _, is_clipped = clipped_surrogate(advantages, ratio, clip_low, clip_high)
    covariances = token_covariances(log_probs, advantages, response_mask)
    eligible = response_mask & ~is_clipped & (covariances > clip_cov_lb) & (covariances < clip_cov_ub)
    index = eligible.nonzero().flatten()  # [M]
    draws = _draws(old_log_probs[index], advantages[index], seed)  # [M]
    count = max(int(clip_cov_ratio * int(response_mask.sum())), 1)
    drawn = np.argsort(draws, kind="stable")[:count]
    selected = torch.zeros_like(response_mask)
    selected[index[torch.from_numpy(drawn).to(index.device)]] = True
    return {"cov_selected": selected}


def select_kl_cov(
    *,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    kl_cov_ratio: float = 0.0002,
) -> dict[str, Tensor]:
    """`cov_selected` [N] bool: the max(1, floor(kl_cov_ratio * N)) tokens of highest covariance.

    N counts the tokens trained on; among equal covariances the first tokens are taken.

    Source: Cui et al. 2025, arXiv:2505.22617, eq. 13; its ratio is 2e-3 for a model of 7B and 2e-4 for 32B.
    """
    index = response_mask.nonzero().flatten()  # [M]
    covariances = token_covariances(log_probs, advantages, response_mask)[index]
    count = max(int(kl_cov_ratio * index.numel()), 1)
    highest = torch.argsort(covariances, descending=True, stable=True)[:count]
    selected = torch.zeros_like(response_mask)
    selected[index[highest]] = True
    return {"cov_selected": selected}


@implements("clip_cov", prepare=select_clip_cov)
def clip_cov_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    cov_selected: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLossTerms:
    """PPO's clipped surrogate, 0 and without gradient at the tokens that `select_clip_cov` drew.

        term = max(-A * ratio, -A * clamp(ratio, 1 - clip_low, 1 + clip_high)) where not drawn, else 0

    Args:
        log_probs: with gradient; any shape, that of all columns.
        cov_selected: bool, from `prepare_columns`.
        clip_low, clip_high: clip ranges below and above a ratio of 1.

    Returns:
        Terms, and the statistics pg_clipfrac (1 where the clipped side won), cov_clipfrac (1 where drawn), ppo_kl
        and ratio.

    Source: Cui et al. 2025, arXiv:2505.22617, eq. 11 and 12, on top of the clipped surrogate.
    """
    log_ratio = log_probs - old_log_probs
    ratio = probability_ratio(log_ratio)
    surrogate, is_clipped = clipped_surrogate(advantages, ratio, clip_low, clip_high)
    with torch.no_grad():
        statistics = {
            PG_CLIPFRAC.last: is_clipped.to(ratio.dtype),
            COV_CLIPFRAC.last: cov_selected.to(ratio.dtype),
            **ratio_statistics(log_ratio, ratio),
        }
    terms = torch.where(cov_selected, torch.zeros_like(surrogate), surrogate)
    return PolicyLossTerms(terms=terms, statistics=statistics)


@implements("kl_cov", prepare=select_kl_cov)
def kl_cov_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    cov_selected: Tensor,
    *,
    ppo_kl_coef: float = 1.0,
) -> PolicyLossTerms:
    """The surrogate without a clip, with a penalty on the move of the tokens of highest covariance.

        term = -A * ratio + (ppo_kl_coef * |log_probs - old_log_probs| where selected)

    The penalty has a gradient of -+ppo_kl_coef as soon as the token has moved by more than rounding does, also at
    advantage 0, and none before.

    Args:
        log_probs: with gradient; any shape, that of all columns.
        cov_selected: bool, from `prepare_columns` (`select_kl_cov`).
        ppo_kl_coef: weight of the penalty. The paper's value is 1; configs of verl carry 0.1.

    Returns:
        Terms, and the statistics kl_cov_frac (1 where penalised), ppo_kl and ratio. ppo_kl is signed, as in every
        loss; elsewhere this loss reports its absolute value.

    Source: Cui et al. 2025, arXiv:2505.22617, eq. 13 and 14; the penalty is the absolute log-ratio, as in the
        code published with it.
    """
    log_ratio = log_probs - old_log_probs
    ratio = probability_ratio(log_ratio)
    penalty = torch.where(cov_selected, distance(log_ratio), torch.zeros_like(log_ratio))
    statistics = {KL_COV_FRAC.last: cov_selected.to(ratio.dtype), **ratio_statistics(log_ratio, ratio)}
    return PolicyLossTerms(terms=-advantages * ratio + ppo_kl_coef * penalty, statistics=statistics)


def _draws(old_log_probs: Tensor, advantages: Tensor, seed: int) -> NDArray[np.float64]:
    """One uniform number per token [M], from what the token is; equal tokens get the numbers 0, 1, ... of one key."""
    bits = [
        # Adding 0 makes one zero of the two that floating point has.
        ((values.detach().double() / _GRAIN).round() + 0.0).cpu().numpy().view(np.uint64)
        for values in (old_log_probs, advantages)
    ]
    keys = bits[0] * _ODD_1 + bits[1] * _ODD_2 + np.uint64(random_key(seed, "clip_cov"))
    order = np.argsort(keys, kind="stable")
    _, starts, counts = np.unique(keys[order], return_index=True, return_counts=True)
    occurrences = np.empty(len(keys), dtype=np.int64)
    occurrences[order] = np.arange(len(keys)) - np.repeat(starts, counts)
    return uniforms(keys, occurrences)
