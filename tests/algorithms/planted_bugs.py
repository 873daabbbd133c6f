"""Estimators with one bug each, and one without: what a check of estimators must find, and must not."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.advantages.groups import center_groups, expand_to_tokens


def centered(rewards: Tensor, group_ids: Tensor) -> Tensor:
    return center_groups(rewards, group_ids)[0]


def right(*, rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    advantages = expand_to_tokens(centered(rewards, group_ids), response_mask)
    return advantages, advantages


def flipped_sign(*, rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    advantages = expand_to_tokens(-centered(rewards, group_ids), response_mask)
    return advantages, advantages


def dropped_mask(*, rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    advantages = centered(rewards, group_ids)[:, None].expand(response_mask.shape)
    return advantages, advantages


def batch_mean(*, rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    advantages = expand_to_tokens(rewards - rewards.mean(), response_mask)
    return advantages, advantages


def contiguous_pairs(*, rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Takes rows 2n and 2n + 1 for a group, whatever their ids are."""
    pairs = torch.arange(len(rewards)) // 2
    return right(rewards=rewards, group_ids=pairs, response_mask=response_mask)


def masked_rewards(
    *, token_level_rewards: Tensor, group_ids: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    rewards = (token_level_rewards * response_mask).sum(dim=-1)
    return right(rewards=rewards, group_ids=group_ids, response_mask=response_mask)


def padded_length(*, rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    return right(rewards=rewards / response_mask.shape[1], group_ids=group_ids, response_mask=response_mask)


def unmasked_values(
    *, rewards: Tensor, values: Tensor, group_ids: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    return right(rewards=rewards - values.mean(-1), group_ids=group_ids, response_mask=response_mask)


def in_place(
    *, rewards: Tensor, values: Tensor, group_ids: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    values.mul_(2.0)
    return right(rewards=rewards, group_ids=group_ids, response_mask=response_mask)


def single_precision(*, rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    return right(rewards=rewards.float(), group_ids=group_ids, response_mask=response_mask)


def too_narrow(*, rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    return rewards, rewards


def divided_by_zero(*, rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    advantages = expand_to_tokens(centered(rewards, group_ids) / 0.0, response_mask)
    return advantages, advantages
