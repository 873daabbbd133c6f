"""Estimators that compare the samples of a prompt first, and whiten over the whole batch after that.

Whitening subtracts the mean over tokens, so in a batch with other prompts the samples of a prompt with equal
rewards get minus that mean, which is 0 where all responses are of one length. Samples without peers are left
out of the mean and the variance, and have 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strop.algorithms.advantages.groups import center_groups, expand_to_tokens, normalize_groups
from strop.algorithms.advantages.registration import implements_outcome
from strop.algorithms.masked_ops import masked_whiten


@implements_outcome("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Reward minus the group's mean, whitened over all sampled tokens of the batch.

    A_i = (r_i - mean_g), then (A - mean) / sqrt(var + 1e-8) over tokens.

    Shapes as in `grpo_advantages`.

    Raises:
        ValueError: a reward is not finite.

    Source: Hu 2025, arXiv:2501.03262, the variant with a group baseline.
    """
    centered, group, count = center_groups(rewards, group_ids)
    return whiten_samples(centered, (count > 1)[group], response_mask)


def whiten_samples(per_sample: Tensor, has_peers: Tensor, response_mask: Tensor) -> Tensor:
    """[B] to [B, R]: whitened over the sampled tokens of samples with peers; exactly 0 elsewhere."""
    counted = response_mask.bool() & has_peers[:, None]  # [B, R]
    return masked_whiten(expand_to_tokens(per_sample, counted), counted)


@implements_outcome("gdpo")
def gdpo_advantages(
    reward_parts: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    *,
    reward_weights: Sequence[float] = (),
) -> Tensor:
    """Each part of the reward normalized within its group, then summed with weights and whitened over the batch.

        A_ik = (r_ik - mean_gk) / (std_gk + STD_EPS);   A_i = sum_k w_k A_ik;   then (A - mean) / sqrt(var + 1e-8)

    so that a part with a small spread is not drowned by one with a large spread.

    Args:
        reward_parts: [B, K], the parts of each sample's reward, each in a unit of its own.
        group_ids: [B]; response_mask: [B, R].
        reward_weights: K weights; none: 1 for each part.

    Raises:
        ValueError: the number of weights is not the number of parts, or a part is not finite.

    Source: Liu et al. 2026, arXiv:2601.05242. The paper whitens over samples; we do over tokens, as
        implementations do, so a long response weighs more in the mean and the variance.

    Deviations: rewards that are no part (a KL penalty) do not enter.
    """
    num_parts = reward_parts.shape[1]
    weights = tuple(reward_weights) or (1.0,) * num_parts
    if len(weights) != num_parts:
        raise ValueError(
            f"reward_weights has {len(weights)} numbers for {num_parts} parts of the reward: give one for each"
        )
    total = torch.zeros_like(reward_parts[:, 0])  # [B]
    for k, weight in enumerate(weights):
        normalized, _, _ = normalize_groups(reward_parts[:, k], group_ids)  # [B]
        total = total + weight * normalized
    _, group, count = center_groups(total, group_ids)
    return whiten_samples(total, (count > 1)[group], response_mask)
