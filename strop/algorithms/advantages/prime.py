"""PRIME: rewards of single tokens beside the outcome, each compared with the other samples of the prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from strop.algorithms.advantages.group_baselines import rloo_advantages
from strop.algorithms.advantages.groups import require_finite
from strop.algorithms.advantages.registration import implements
from strop.algorithms.advantages.reward_to_go import reward_to_go
from strop.algorithms.batch_metrics import PROCESS
from strop.algorithms.implicit_reward import pair_accuracy
from strop.algorithms.masked_ops import masked_sum, masked_whiten

NORM_EPS = 1e-6
"""Added to the largest return before process rewards are divided by it: where a model has hardly moved, rounding stays
small."""


def prime_metrics(columns: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, float]:
    """PROCESS of a step.

    Args:
        columns: as `prime_advantages` takes them.
        settings: gamma, and the settings of the estimator.
    """
    mask, process_rewards = columns["response_mask"], columns["process_rewards"]
    rewards, groups = columns["rewards"], columns["group_ids"]
    process, outcome = process_and_outcome(
        rewards,
        process_rewards,
        groups,
        mask,
        gamma=settings["gamma"],
        process_norm=bool(settings["process_norm"]),
    )
    weighted = float(settings["process_weight"]) * process, float(settings["outcome_weight"]) * outcome
    metrics = {PROCESS.of("advantage_share"): process_share(*weighted, mask)}
    accuracy = pair_accuracy(
        torch.where(mask, process_rewards, torch.zeros_like(process_rewards)).sum(dim=-1), rewards, groups
    )
    return metrics if math.isnan(accuracy) else {**metrics, PROCESS.of("pair_acc"): accuracy}


@implements("prime", measure=prime_metrics)
def prime_advantages(
    *,
    rewards: Tensor,
    process_rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    process_weight: float = 1.0,
    outcome_weight: float = 1.0,
    process_norm: bool = True,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """Leave-one-out returns of process rewards, token by token, and of outcomes; whitened over the batch.

    R_it = w_p sum_{u >= t} gamma^(u - t) (p_iu - mean of m_j over j != i) + w_o (r_i - mean of r_j over j != i)

    over the sampled tokens u of sample i and the other samples j of its group; m_j is the mean of p over the sampled
    tokens of sample j. With `process_norm`, p is the process reward divided by the largest |sum of process rewards from
    a token to the end| in the batch, plus 1e-6: then none of these sums is above 1, however far their model has moved.

    Args:
        rewards: [B], one outcome reward per sample.
        process_rewards: [B, R], see `strop.algorithms.implicit_reward`; any number outside the mask.
        group_ids: [B] int64, equal for samples of one prompt, in any order.
        response_mask: [B, R], true on tokens the policy sampled.
        gamma: discount of later tokens' process rewards, once per sampled token.
        process_weight, outcome_weight: w_p, w_o.
        process_norm: divide process rewards by their largest return.
        whiten: advantages are R less its mean, divided by its standard deviation, over the sampled tokens of the batch;
            else R itself.

    Returns:
        Advantages and R, [B, R] each, in the dtype of `rewards`; 0 where response_mask is false, and in groups
        of one. A sample without sampled tokens is no part of the baseline of process rewards.

    Raises:
        ValueError: a reward, or a process reward of a sampled token, is NaN or infinite.

    Source: Cui et al. 2025, arXiv:2502.01456, whose formula is R; their recipe in verl divides and whitens.

    Deviations: the recipe takes K / (K - 1) p_iu minus the sum of all means divided by K - 1, which has the sample's
        own mean in it; it gives the last token no process reward, and finds the largest sum on each rank.
    """
    process, outcome = process_and_outcome(
        rewards, process_rewards, group_ids, response_mask, gamma=gamma, process_norm=process_norm
    )
    returns = process_weight * process + outcome_weight * outcome
    counted = response_mask.bool() & _has_peers(group_ids)[:, None]
    advantages = masked_whiten(returns, counted) if whiten else returns
    return advantages, returns


def process_and_outcome(
    rewards: Tensor,
    process_rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    *,
    gamma: float,
    process_norm: bool,
) -> tuple[Tensor, Tensor]:
    """The two parts of R, [B, R] each, before their weights; arguments as of `prime_advantages`."""
    sampled = response_mask.bool()
    valid_rewards = torch.where(sampled, process_rewards, torch.zeros_like(process_rewards))
    require_finite(valid_rewards, "process_rewards", "the loss of the process reward model")
    if process_norm and valid_rewards.numel():
        largest = reward_to_go(valid_rewards, sampled, gamma=1.0).abs().max()
        valid_rewards = valid_rewards / (largest + NORM_EPS)
    relative = _minus_mean_of_others(valid_rewards, group_ids, sampled)
    process = reward_to_go(relative, sampled, gamma=gamma).to(rewards.dtype)
    return process, rloo_advantages(rewards, group_ids, response_mask)


def process_share(process: Tensor, outcome: Tensor, response_mask: Tensor) -> float:
    """Of the squares of both parts [B, R], summed over sampled tokens, the share of the process rewards' part; 0 where
    both are 0."""
    of_process, of_outcome = (float(masked_sum(part.square(), response_mask)) for part in (process, outcome))
    return of_process / (of_process + of_outcome) if of_process else 0.0


def _has_peers(group_ids: Tensor) -> Tensor:
    """[B] bool: another sample of the group is there."""
    _, group, count = torch.unique(group_ids, return_inverse=True, return_counts=True)
    peers: Tensor = (count > 1)[group]
    return peers


def _minus_mean_of_others(rewards: Tensor, group_ids: Tensor, sampled: Tensor) -> Tensor:
    """Rewards [B, R] minus the mean over the other samples of the group of their token means; 0 outside the mask, and
    where no other sample of the group has a token."""
    _, group = torch.unique(group_ids, return_inverse=True)  # [B]
    num_groups = int(group.max()) + 1 if len(group) else 0
    infinite = torch.full((num_groups,), torch.inf, dtype=rewards.dtype, device=rewards.device)  # [G]
    row_lowest = torch.where(sampled, rewards, torch.inf).amin(dim=-1)  # [B]
    lowest = infinite.scatter_reduce(0, group, row_lowest, "amin")  # [G]
    # As in center_groups: without the smallest reward, equal rewards give exactly 0.
    shifted = torch.where(sampled, rewards - lowest[group][:, None], torch.zeros_like(rewards))
    count = sampled.sum(dim=-1)  # [B]
    means = shifted.sum(dim=-1) / count.clamp(min=1)  # [B]
    zero = torch.zeros_like(infinite)
    other_means = zero.index_add(0, group, means)[group] - means  # [B]
    num_others = zero.index_add(0, group, (count > 0).to(means.dtype))[group] - (count > 0).to(means.dtype)
    relative = shifted - (other_means / num_others.clamp(min=1))[:, None]
    return torch.where(sampled & (num_others > 0)[:, None], relative, torch.zeros_like(relative))
