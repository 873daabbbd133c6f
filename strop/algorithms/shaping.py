"""Reward shaping and reweighting of samples: what happens to scores before they become advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.advantages.groups import require_finite
from strop.algorithms.config import AlgorithmConfig
from strop.base.randomness import random_key, uniforms

PfPpoMethod = Literal["pow", "max_min", "max_random"]
PF_PPO_METHODS: tuple[str, ...] = get_args(PfPpoMethod)

PF_PPO_FLOOR = 1e-8
"""Weight that every sample has beside its own, so that the weights of equal zeros can be drawn from."""
PF_PPO_MAX_WEIGHT, PF_PPO_OTHER_WEIGHT = 0.4, 0.1
"""Weights of max_random: of samples with the largest score, and of all others."""


def overlong_penalty(
    response_lengths: Tensor,
    *,
    max_tokens: int,
    buffer_tokens: int,
    factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """DAPO's soft penalty on long responses [B], to be added to the reward: between -factor and 0.

        0                                                    up to max_tokens - buffer_tokens
        factor * (max_tokens - buffer_tokens - len) / buffer_tokens    from there to max_tokens
        -factor                                              above max_tokens

    Args:
        response_lengths: [B] integers, tokens of each response.
        max_tokens: the length at which the penalty is full.
        buffer_tokens: how far below it the penalty starts.
        factor: the full penalty, in reward units, at least 0.
        dtype: of the result.

    Raises:
        ValueError: the buffer is not between 1 and max_tokens, or the factor is negative or not finite.

    Source: Yu et al. 2025, arXiv:2503.14476, eq. 13; the factor is 1 there.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(
            f"the over-long buffer is {buffer_tokens} tokens and the maximum length {max_tokens}: the buffer lies "
            f"below the maximum, so use a number between 1 and {max_tokens}"
        )
    if not (math.isfinite(factor) and factor >= 0):
        raise ValueError(
            f"the over-long penalty factor is {factor}: use a finite number of at least 0, such as 1.0"
        )
    free = max_tokens - buffer_tokens
    share = (response_lengths.to(torch.float64) - free) / buffer_tokens
    # Subtracting from 0 keeps a response without a penalty at 0, not at -0.
    return (0.0 - factor * share.clamp(0.0, 1.0)).to(dtype)


def shaped_score(
    score: float,
    num_response_tokens: int,
    *,
    weight: float,
    max_tokens: int,
    buffer_tokens: int,
    factor: float,
) -> float:
    """What a sample is trained with: its weighted score, less what a long response loses (`overlong_penalty`).

    Args:
        score: of the sample.
        num_response_tokens: its length.
        weight: of the score.
        max_tokens, buffer_tokens, factor: of the penalty; a buffer of 0 is none.
    """
    if not buffer_tokens:
        return weight * score
    lengths = torch.tensor([num_response_tokens])
    penalty = overlong_penalty(lengths, max_tokens=max_tokens, buffer_tokens=buffer_tokens, factor=factor)
    return weight * score + float(penalty)


def pf_ppo_weights(scores: Tensor, *, method: PfPpoMethod = "pow", power: float = 2.0) -> Tensor:
    """How likely each sample is to be drawn for training [B], not normalized, all above 0.

        pow           |s|^power
        max_min       1 for samples with the largest or the smallest score, 0 for the rest
        max_random    0.4 for samples with the largest score, 0.1 for the rest

    each plus 1e-8. Largest and smallest are over all samples given: call once per prompt to filter within
    prompts, as the paper does; implementations do it once per batch.

    Args:
        scores: [B] floating point, finite.
        method: one of the three above.
        power: exponent of `pow`, at least 0.

    Raises:
        ValueError: no scores, a score that is not finite, an unknown method, or a negative power.

    Source: Zhang et al. 2024, arXiv:2409.06957; the numbers are those of implementations.
    """
    require_finite(scores, "scores")
    if method not in PF_PPO_METHODS:
        raise ValueError(f"unknown reweighting {method!r}; known: {', '.join(PF_PPO_METHODS)}")
    if not (math.isfinite(power) and power >= 0):
        raise ValueError(f"the reweighting power is {power}: use a finite number of at least 0, such as 2.0")
    if not len(scores):
        raise ValueError("there are no scores to weigh: the batch has no samples")
    is_max = scores == scores.max()
    if method == "pow":
        weights = scores.abs() ** power
    elif method == "max_min":
        weights = (is_max | (scores == scores.min())).to(scores.dtype)
    else:
        weights = torch.full_like(scores, PF_PPO_OTHER_WEIGHT).masked_fill(is_max, PF_PPO_MAX_WEIGHT)
    return weights + PF_PPO_FLOOR


def resample_rows(weights: Tensor, *, key: int, num_rows: int | None = None) -> Tensor:
    """Row numbers drawn with replacement, row i with chance w_i / sum w: [num_rows] int64, in the order of the draws.

    A pure function of its arguments: no random state is read or advanced. Draw number n uses number n of the key,
    so a longer result starts with the shorter one.

    Args:
        weights: [B], finite, at least 0, not all 0; a row of weight 0 is never drawn.
        key: from `strop.base.randomness.random_key(seed, "pf_ppo", step)` or the like.
        num_rows: how many to draw; not given: B.

    Raises:
        ValueError: weights that are no weights, or a negative number of rows.
    """
    require_finite(weights, "weights", "the scores they were made of")
    total = weights.to(torch.float64).cumsum(dim=0)  # [B]
    if not len(weights) or (weights < 0).any() or not total[-1] > 0:
        raise ValueError(
            f"weights must be at least 0 with a sum above 0, got {weights.tolist()[:8]}: nothing can be drawn"
        )
    num_draws = len(weights) if num_rows is None else num_rows
    if num_draws < 0:
        raise ValueError(f"{num_draws} rows are to be drawn: use a number of at least 0")
    positions = np.arange(num_draws, dtype=np.int64)
    draws = torch.from_numpy(uniforms(np.full(num_draws, key, dtype=np.uint64), positions))
    # A product that rounds up to the sum would fall beyond the last row.
    targets = (draws.to(total.device) * total[-1]).clamp(
        max=torch.nextafter(total[-1], torch.zeros_like(total[-1]))
    )
    return torch.searchsorted(total, targets, right=True)


def drawn_rows(
    scores: Tensor, uids: Sequence[str], algorithm: AlgorithmConfig, *, seed: int, step: int
) -> list[int]:
    """Row numbers to train on, in ascending order, one as often as it was drawn.

    As many are drawn as there are rows; with algorithm.resampling_within=prompt, of each prompt as many as it has. The
    draw is a pure function of the scores and of (seed, step), or of (seed, step, prompt) within prompts: a resume and
    any number of ranks draw the same.

    Args:
        scores: [B].
        uids: [B], equal for the samples of a prompt.
        algorithm: its resampling.
        seed, step: of the run.

    Source: Zhang et al. 2024, arXiv:2409.06957, which draws within prompts; verl draws within the batch.
    """
    members: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        members.setdefault(uid if algorithm.resampling_within == "prompt" else "", []).append(row)
    assert algorithm.resampling != "none", "only called to draw"
    method: PfPpoMethod = algorithm.resampling
    drawn: list[int] = []
    for uid, rows in members.items():
        weights = pf_ppo_weights(scores[rows], method=method, power=algorithm.resampling_power)
        draws = resample_rows(weights, key=random_key(seed, "pf_ppo", step, uid))
        drawn += [rows[draw] for draw in draws.tolist()]
    return sorted(drawn)
