"""ReMax: the reward of a prompt's greedy answer is what its samples are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.advantages.groups import require_finite
from strop.algorithms.advantages.registration import implements
from strop.algorithms.advantages.reward_to_go import reward_to_go


@implements("remax")
def remax(
    *, token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Reward-to-go minus the reward of the prompt's greedy answer, and the reward-to-go itself.

    A_t = G_t - b_i on sampled tokens, G without discount.

    Args:
        token_level_rewards: [B, R]; response_mask: [B, R], true on sampled tokens.
        reward_baselines: [B], total reward of the greedy answer to each row's prompt, in reward units.

    Raises:
        ValueError: a reward or a baseline is NaN or infinite.

    Source: Li et al. 2024, arXiv:2310.10505, algorithm 1.

    Deviations: the reward of a given token counts, which implementations drop.
    """
    require_finite(reward_baselines, "reward_baselines", "the rewards of the greedy answers")
    returns = reward_to_go(token_level_rewards, response_mask, gamma=1.0)
    baselines = reward_baselines.to(returns.dtype)[:, None]  # [B, 1]
    return torch.where(response_mask.bool(), returns - baselines, torch.zeros_like(returns)), returns
