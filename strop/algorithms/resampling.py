"""PF-PPO: samples are drawn for training by their scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.advantages.groups import require_finite
from strop.algorithms.config import AlgorithmConfig
from strop.utils.rng import random_key, uniforms

PfPpoMethod = Literal["pow", "max_min", "max_random"]
PF_PPO_METHODS: tuple[str, ...] = get_args(PfPpoMethod)

PF_PPO_FLOOR = 1e-8
"""Weight that every sample has beside its own, so that the weights of equal zeros can be drawn from."""
PF_PPO_MAX_WEIGHT, PF_PPO_OTHER_WEIGHT = 0.4, 0.1
"""Weights of max_random: of samples with the largest score, and of all others."""


def pf_ppo_weights(scores: Tensor, *, method: PfPpoMethod = "pow", power: float = 2.0) -> Tensor:
    """Sampling weight of each sample for training [B], not normalized, all above 0.

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
        key: from `strop.utils.rng.random_key(seed, "pf_ppo", step)` or the like.
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
    scores: Tensor, uids: Sequence[str], settings: AlgorithmConfig, *, seed: int, step: int
) -> list[int]:
    """Row numbers to train on, in ascending order, one as often as it was drawn.

    As many are drawn as there are rows; with algorithm.resampling_within=prompt, of each prompt as many as it has. The
    draw is a pure function of the scores and of (seed, step), or of (seed, step, prompt) within prompts: a resume and
    any number of ranks draw the same.

    Args:
        scores: [B].
        uids: [B], equal for the samples of a prompt.
        settings: its resampling.
        seed, step: of the run.

    Source: Zhang et al. 2024, arXiv:2409.06957, which draws within prompts; verl draws within the batch.
    """
    members: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        members.setdefault(uid if settings.resampling_within == "prompt" else "", []).append(row)
    assert settings.resampling != "none", "only called to draw"
    method: PfPpoMethod = settings.resampling
    drawn: list[int] = []
    for uid, rows in members.items():
        weights = pf_ppo_weights(scores[rows], method=method, power=settings.resampling_power)
        draws = resample_rows(weights, key=random_key(seed, "pf_ppo", step, uid))
        drawn += [rows[draw] for draw in draws.tolist()]
    return sorted(drawn)
