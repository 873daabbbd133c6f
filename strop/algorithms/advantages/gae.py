"""Generalized advantage estimation, from the values of a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.advantages.groups import require_finite
from strop.algorithms.advantages.registration import implements
from strop.algorithms.masked_ops import masked_whiten


def gae_advantages(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """Generalized advantage estimates [B, R] over the sampled tokens of each row; 0 outside the mask.

        delta_t = r_t + gamma * V_next - V_t
        A_t     = delta_t + gamma * lam * A_next

    where "next" is the next *sampled* token of the row, and V and A after the last one are 0: a tool's reply
    between two sampled tokens is part of the transition, not a state with a value of its own.

    The reward of a given token is part of r_t of the last sampled token before it, as in `reward_to_go`; the
    usual implementations drop it. One before every sampled token has nobody to credit.

    Args:
        token_level_rewards: [B, R], in any unit.
        values: [B, R], the critic's estimate before each token, in reward units; any number outside the mask.
        response_mask: [B, R], true on tokens the policy sampled.
        gamma: discount, once per sampled token.
        lam: weight of later errors: 1 gives returns minus values, 0 the one-step error.

    Raises:
        ValueError: a reward, or the value of a sampled token, is NaN or infinite.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    require_finite(token_level_rewards)
    sampled = response_mask.bool()
    if not torch.isfinite(values[sampled]).all():
        raise ValueError(
            "the critic gave a value that is NaN or infinite for a sampled token; look at its loss"
        )
    zero = torch.zeros_like(token_level_rewards[:, 0])  # [B]
    next_value, next_advantage, pending = zero, zero, zero
    advantages = torch.zeros_like(token_level_rewards)  # [B, R]
    for t in reversed(range(token_level_rewards.shape[1])):
        is_sampled = sampled[:, t]
        reward = token_level_rewards[:, t] + pending
        delta = reward + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(is_sampled, advantage, zero)
        next_advantage = torch.where(is_sampled, advantage, next_advantage)
        next_value = torch.where(is_sampled, values[:, t], next_value)
        pending = torch.where(is_sampled, zero, reward)
    return advantages


@implements("gae")
def gae(
    *,
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`gae_advantages` whitened over all sampled tokens of the batch; returns are advantage + value before that.

    Both are exactly 0 outside the mask.

    Raises:
        ValueError: a number is not finite.
    """
    advantages = gae_advantages(token_level_rewards, values, response_mask, gamma=gamma, lam=lam)
    returns = torch.where(response_mask.bool(), advantages + values, torch.zeros_like(values))
    return masked_whiten(advantages, response_mask), returns
