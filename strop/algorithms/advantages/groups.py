"""Helpers shared by the estimators: checks, groups of samples, and one number per sample spread over its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

STD_EPS = 1e-6
"""Added to a group's standard deviation before rewards are divided by it, in reward units."""


def center_groups(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards minus their group's mean [B], group numbers 0..G-1 [B], and group sizes [G].

    The smallest reward of a group is taken off before the mean, which changes nothing in exact arithmetic
    and makes equal rewards give exactly 0: eight rewards of 0.1 do not sum to 0.8 in floating point, and
    the rest, divided by a standard deviation of about 0, would be an advantage out of nothing.

    Raises:
        ValueError: a reward is NaN or infinite, or rewards are whole numbers by type.
    """
    require_finite(rewards)
    _, group = torch.unique(group_ids, return_inverse=True)  # [B]
    count = torch.bincount(group).to(rewards.dtype)  # [G]
    lowest = torch.full_like(count, torch.inf).scatter_reduce(0, group, rewards, "amin")  # [G]
    shifted = rewards - lowest[group]  # [B]
    total = torch.zeros_like(count).index_add(0, group, shifted)  # [G]
    return shifted - (total / count)[group], group, count


def normalize_groups(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `center_groups`, with the centered rewards divided by (sample standard deviation + STD_EPS)."""
    centered, group, count = center_groups(rewards, group_ids)
    return centered / (group_std(centered, group, count)[group] + STD_EPS), group, count


def group_std(centered: Tensor, group: Tensor, count: Tensor) -> Tensor:
    """[G]: the sample standard deviation (divided by K - 1) of rewards [B] that are centered already."""
    squares = torch.zeros_like(count).index_add(0, group, centered.square())  # [G]
    return (squares / (count - 1).clamp(min=1)).sqrt()


def expand_to_tokens(per_sample: Tensor, response_mask: Tensor) -> Tensor:
    """[B] to [B, R]: each sample's value on its sampled tokens, 0 elsewhere."""
    zero = torch.zeros((), dtype=per_sample.dtype, device=per_sample.device)
    return torch.where(response_mask.bool(), per_sample[:, None], zero)


def require_finite(rewards: Tensor, label: str = "rewards", look_at: str = "the reward function") -> None:
    """ValueError that names the rows whose numbers are NaN or infinite; rows come first in the shape."""
    if not rewards.is_floating_point():
        raise ValueError(f"{label} have dtype {rewards.dtype}: convert them with {label}.float()")
    if not torch.isfinite(rewards).all():
        bad = sorted(set((~torch.isfinite(rewards)).nonzero()[:, 0].tolist()))
        raise ValueError(f"{label} must be finite, but those of rows {bad[:8]} are not; check {look_at}")
