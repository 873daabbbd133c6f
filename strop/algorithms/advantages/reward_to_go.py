"""Estimators made of rewards-to-go: credit that differs between the tokens of one response."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.advantages.groups import require_finite
from strop.algorithms.advantages.registration import implements
from strop.algorithms.masked_ops import masked_whiten


def reward_to_go(token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float) -> Tensor:
    """[B, R]: rewards from each sampled token on, discounted once per sampled token; 0 outside the mask.

    G_t = r_t + gamma * G_next, over sampled tokens. The reward of a token that was given (a tool's reply) is
    part of r_t of the last sampled token before it; one before every sampled token has nobody to credit.

    Raises:
        ValueError: a reward is NaN or infinite.
    """
    require_finite(token_level_rewards)
    sampled = response_mask.bool()
    zero = torch.zeros_like(token_level_rewards[:, 0])  # [B]
    future, pending = zero, zero  # return of the next sampled token; rewards of given tokens before it
    returns = torch.zeros_like(token_level_rewards)  # [B, R]
    for t in reversed(range(token_level_rewards.shape[1])):
        reward = token_level_rewards[:, t] + pending
        value = reward + gamma * future
        returns[:, t] = torch.where(sampled[:, t], value, zero)
        future = torch.where(sampled[:, t], value, future)
        pending = torch.where(sampled[:, t], zero, reward)
    return returns


@implements("reinforce_plus_plus")
def reinforce_plus_plus(
    *, token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Reward-to-go whitened over all sampled tokens of the batch, and the reward-to-go itself.

    Raises:
        ValueError: a reward is not finite.

    Source: Hu 2025, arXiv:2501.03262.

    Deviations: the reward of a given token counts, which implementations drop.
    """
    returns = reward_to_go(token_level_rewards, response_mask, gamma=gamma)
    return masked_whiten(returns, response_mask), returns
