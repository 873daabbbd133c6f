"""Estimators that compare the samples of a prompt first, and whiten over the whole batch after that.

Whitening subtracts the mean over tokens, so in a batch with other prompts the samples of a prompt with equal
rewards get minus that mean, which is 0 where all responses are of one length. Samples without peers are left
out of the mean and the variance, and have 0.
"""

from __future__ import annotations

from torch import Tensor

from strop.algorithms.advantages.groups import center_groups, spread
from strop.algorithms.advantages.registration import implements_outcome
from strop.algorithms.masked import masked_whiten


@implements_outcome("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Reward minus the group's mean, whitened over all sampled tokens of the batch.

    A_i = (r_i - mean_g), then (A - mean) / sqrt(var + 1e-8) over tokens.

    Shapes as in `grpo_advantages`.

    Raises:
        ValueError: a reward is not finite, or a single token has anything to be compared with.

    Source: Hu 2025, arXiv:2501.03262, the variant with a group baseline.
    """
    centered, group, count = center_groups(rewards, group_ids)
    return whiten_samples(centered, (count > 1)[group], response_mask)


def whiten_samples(per_sample: Tensor, has_peers: Tensor, response_mask: Tensor) -> Tensor:
    """[B] to [B, R]: whitened over the sampled tokens of samples with peers; exactly 0 elsewhere."""
    counted = response_mask.bool() & has_peers[:, None]  # [B, R]
    per_token = spread(per_sample, counted)
    return masked_whiten(per_token, counted) if counted.any() else per_token
