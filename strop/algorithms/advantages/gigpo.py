"""Estimators for episodes of several answers: whole episodes are compared, and answers given in the same state."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.advantages.groups import (
    center_groups,
    expand_to_tokens,
    normalize_groups,
    require_finite,
)
from strop.algorithms.advantages.registration import implements_outcome


@implements_outcome("gigpo")
def gigpo_advantages(
    turn_rewards: Tensor,
    sample_index: Tensor,
    turn_index: Tensor,
    anchor_ids: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    *,
    norm_by_std: bool = True,
    gamma: float = 1.0,
    step_weight: float = 1.0,
) -> Tensor:
    """The episode's advantage among its prompt's episodes, plus the answer's among those given in the same state.

        A = A_episode + step_weight * A_step
        A_episode = (R_i - mean_g) / (std_g + STD_EPS)        R_i: sum of the episode's rewards, once per episode
        A_step    = (G_t - mean_s) / (std_s + STD_EPS)        G_t = r_t + gamma * G_t+1, over the answers from t on

    g are the episodes of a prompt, s the answers in them that were given in the same state. Without `norm_by_std`
    both are numerators alone.

    Args:
        turn_rewards: [B] floating point, what each answer earned by itself.
        sample_index: [B] int64, number of the episode within its prompt.
        turn_index: [B] int64, number of the answer within its episode.
        anchor_ids: [B] int64, equal for answers to one prompt in the same state; below 0: a state like no other.
        group_ids: [B] int64, equal for samples of one prompt.
        response_mask: [B, R], true on tokens the policy sampled.
        norm_by_std: divide by the standard deviation (the paper's F_norm = std); else F_norm = 1.
        gamma: discount, once per answer, in A_step alone.
        step_weight: omega of the paper.

    Returns:
        [B, R] in the dtype of `turn_rewards`, constant over an answer. A_step is 0 for an answer that is alone in
        its state, A_episode for an episode that is alone.

    Raises:
        ValueError: a reward is NaN or infinite.

    Source: Feng et al. 2025, arXiv:2505.10978, eq. 3 to 8. With F_norm = 1 the paper speaks of an unbiased
        leave-one-out estimate, which is this one times N / (N - 1).
    """
    require_finite(turn_rewards)
    episode = _numbered(group_ids, sample_index)  # [B]
    totals = _returns(turn_rewards, episode, turn_index, gamma=1.0)[1]  # [E]
    returns, _ = _returns(turn_rewards, episode, turn_index, gamma=gamma)  # [B]
    group_of_episode = torch.zeros(len(totals), dtype=group_ids.dtype, device=group_ids.device)
    group_of_episode[episode] = group_ids  # [E]
    alone = -1 - torch.arange(len(anchor_ids), device=anchor_ids.device)  # no two are equal
    state = _numbered(group_ids, torch.where(anchor_ids < 0, alone, anchor_ids))  # [B]
    compare = normalize_groups if norm_by_std else center_groups
    of_episode, _, _ = compare(totals, group_of_episode)  # [E]
    of_step, _, _ = compare(returns, state)  # [B]
    return expand_to_tokens(of_episode[episode] + step_weight * of_step, response_mask)


def _numbered(first: Tensor, second: Tensor) -> Tensor:
    """[B] int64, from 0: equal where both numbers are."""
    number: Tensor = torch.unique(torch.stack([first, second]), dim=1, return_inverse=True)[1]
    return number


def _returns(rewards: Tensor, episode: Tensor, turn: Tensor, *, gamma: float) -> tuple[Tensor, Tensor]:
    """Discounted return of each answer [B] and of each episode from its first answer on [E].

    A row that stands in the batch twice counts once in its episode.
    """
    future = rewards.new_zeros(int(episode.max()) + 1 if len(episode) else 0)  # [E]
    returns = torch.zeros_like(rewards)
    for turn_index in reversed(torch.unique(turn).tolist()):
        in_turn = turn == turn_index
        returns[in_turn] = rewards[in_turn] + gamma * future[episode[in_turn]]
        future[episode[in_turn]] = returns[in_turn]
    return returns, future
