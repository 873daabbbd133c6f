"""The optimal token baseline: every token is compared with the peers' tokens at the same place.

A sample is a noisy witness where its own gradient is large, so the baseline of least variance weighs the returns
of a group by the squared gradient norm that each has gathered up to that place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from strop.algorithms.advantages.group_baselines import lead_of_the_best
from strop.algorithms.advantages.groups import require_finite
from strop.algorithms.advantages.registration import implements
from strop.algorithms.advantages.reward_to_go import reward_to_go
from strop.algorithms.batch_metrics import VARIANCE_PROXY
from strop.algorithms.masked_ops import masked_sum


def token_baseline_advantages(
    returns: Tensor,
    energy: Tensor,
    places: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    *,
    handle_zero_tail: bool = False,
) -> Tensor:
    """Returns minus their mean over the group's sampled tokens at the same place, weighted by energy: [B, R].

    B_p = sum_i G_ip W_ip / sum_i W_ip over the samples of the group with a sampled token at place p. Where no
    weight is above 0 (every such token was certain, and has no gradient), the plain mean. A token alone at its
    place has no baseline: its advantage is 0.

    Args:
        returns: [B, R]; energy: [B, R], weights of at least 0.
        places: [B, R] int64, from 0 to R - 1: what "the same place" means.
        group_ids: [B]; response_mask: [B, R]; nothing outside the mask is read.
        handle_zero_tail: see `optimal_token_baseline`.
    """
    sampled = response_mask.bool()
    _, group = torch.unique(group_ids, return_inverse=True)  # [B]
    cells = (group[:, None] * returns.shape[1] + places)[sampled]  # [N], one number per (group, place)
    _, cell = torch.unique(cells, return_inverse=True)  # [N], values 0..C-1
    count = torch.bincount(cell).to(returns.dtype)  # [C]
    zero = torch.zeros_like(count)  # [C]
    # As in center_groups: without the smallest return, equal returns give exactly 0.
    lowest = torch.full_like(count, torch.inf).scatter_reduce(0, cell, returns[sampled], "amin")
    shifted = returns[sampled] - lowest[cell]  # [N]
    weight = energy[sampled].to(returns.dtype)  # [N]
    is_certain = zero.index_add(0, cell, weight) == 0  # [C]
    weight = torch.where(is_certain[cell], torch.ones_like(weight), weight)
    baseline = zero.index_add(0, cell, weight * shifted) / zero.index_add(0, cell, weight)  # [C]
    advantages = torch.where((count > 1)[cell], shifted - baseline[cell], torch.zeros_like(shifted))  # [N]
    result = torch.zeros_like(returns).masked_scatter(sampled, advantages)
    return (
        torch.where(_zero_tail(places, group_ids, sampled), returns, result) if handle_zero_tail else result
    )


def gradient_energy(
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    response_mask: Tensor,
    rollout_is_weights: Tensor | None = None,
) -> Tensor:
    """[B, R]: squared gradient norm with respect to the logits, summed over the sampled tokens so far.

    w_t = (1 - 2 pi_t + sum over the vocabulary of pi^2) * rho_t^2, which is |e_token - pi|^2 times the squared
    importance weight (1 without one); W_t is the sum of w over sampled tokens up to t, t included.

    Args:
        old_log_probs: [B, R], log pi_t; sum_pi_squared: [B, R], between 0 and 1.
        response_mask: [B, R], true on sampled tokens.
        rollout_is_weights: [B, R], importance weights between trainer and rollout, at least 0.

    Raises:
        ValueError: a number of a sampled token is NaN or infinite.
    """
    sampled = response_mask.bool()
    zero = torch.zeros_like(old_log_probs)
    log_probs, squares = (torch.where(sampled, part, zero) for part in (old_log_probs, sum_pi_squared))
    require_finite(log_probs, "old_log_probs", "the log-probs of sampled tokens")
    require_finite(squares, "sum_pi_squared", "the log-probs of sampled tokens")
    # At least (1 - pi)^2 in exact arithmetic; rounding may leave it just below 0.
    energy = (1 - 2 * log_probs.exp() + squares).clamp(min=0)
    if rollout_is_weights is not None:
        weights = torch.where(sampled, rollout_is_weights.to(zero.dtype), zero)
        require_finite(weights, "rollout_is_weights", "the rollout's log-probs")
        energy = energy * weights.square()
    return torch.where(sampled, energy, zero).cumsum(dim=-1)


def variance_proxies(columns: Mapping[str, Tensor], settings: Mapping[str, Any]) -> dict[str, float]:
    """VARIANCE_PROXY of a step; samples without sampled tokens are left out.

    As in verl, importance weights scale the total power by the square of a sample's mean weight, and the energies in
    `expected_w` token by token.

    Args:
        columns: advantages [B, R], and what `gradient_energy` takes.
        settings: of the estimator; none matters.
    """
    mask = columns["response_mask"].bool()
    num_tokens = mask.sum(dim=-1)  # [B]
    sampled = num_tokens > 0
    if not sampled.any():
        return {}
    of_policy = columns["old_log_probs"], columns["sum_pi_squared"], mask
    weights = columns.get("rollout_is_weights")
    energy = gradient_energy(*of_policy).amax(dim=-1)[sampled]  # [B'], as it only grows along a sample
    weighted = (
        energy if weights is None else gradient_energy(*of_policy, weights).amax(dim=-1)[sampled]
    )  # [B']

    def mean_square(values: Tensor) -> Tensor:
        """The square of each sample's mean over its tokens: [B']."""
        return (masked_sum(values, mask, axis=-1)[sampled] / num_tokens[sampled]).square()

    squares = mean_square(columns["advantages"])
    power = squares * energy if weights is None else mean_square(weights) * squares * energy
    return {
        VARIANCE_PROXY.of("proxy2_total_power"): float(power.mean()),
        VARIANCE_PROXY.of("expected_a_squared"): float(squares.mean()),
        VARIANCE_PROXY.of("expected_w"): float(weighted.mean()),
    }


@implements("optimal_token_baseline", measure=variance_proxies)
def optimal_token_baseline(
    *,
    token_level_rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = False,
) -> tuple[Tensor, Tensor]:
    """Optimal token baseline of single-turn responses; "the same place" is the column. Advantages and rewards-to-go.

    A_t = G_t - sum_j G_jt W_jt / sum_j W_jt over the group, W as in `gradient_energy`.

    Args:
        token_level_rewards: [B, R]; group_ids: [B]; response_mask: [B, R].
        old_log_probs, sum_pi_squared, rollout_is_weights: [B, R], see `gradient_energy`.
        handle_zero_tail: give the tokens that the longest sample of a group has beyond the second-longest, which
            have no peer, their whole return as advantage (baseline 0). False: their advantage is 0.

    Raises:
        ValueError: a reward, or a number of a sampled token, is NaN or infinite.

    Source: Li et al. 2026, arXiv:2602.07078.

    Deviations: no 1e-8 in the divisor, so equal returns give exactly 0; the reward of a given token counts; a
        token or a sample without peers has 0, where implementations differ in the default of `handle_zero_tail`.
    """
    returns = reward_to_go(token_level_rewards, response_mask, gamma=1.0)
    energy = gradient_energy(old_log_probs, sum_pi_squared, response_mask, rollout_is_weights)
    places = torch.arange(response_mask.shape[1], device=response_mask.device).expand(response_mask.shape)
    advantages = token_baseline_advantages(
        returns, energy, places, group_ids, response_mask, handle_zero_tail=handle_zero_tail
    )
    return advantages, returns


@implements("tir_optimal_token_baseline", measure=variance_proxies)
def tir_optimal_token_baseline(
    *,
    token_level_rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = False,
) -> tuple[Tensor, Tensor]:
    """Optimal token baseline of tool-using responses: "the same place" counts sampled tokens only.

    Token number n that the policy sampled is compared with the peers' token number n, however long the tools'
    replies between them were. All else as in `optimal_token_baseline`.
    """
    returns = reward_to_go(token_level_rewards, response_mask, gamma=1.0)
    energy = gradient_energy(old_log_probs, sum_pi_squared, response_mask, rollout_is_weights)
    places = (response_mask.bool().cumsum(dim=-1) - 1).clamp(min=0)
    advantages = token_baseline_advantages(
        returns, energy, places, group_ids, response_mask, handle_zero_tail=handle_zero_tail
    )
    return advantages, returns


def _zero_tail(places: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """[B, R] bool: sampled tokens of a group's one longest sample beyond its second-longest; not in groups of one."""
    sampled = response_mask.bool()
    _, group = torch.unique(group_ids, return_inverse=True)  # [B]
    count = torch.bincount(group)  # [G]
    last = torch.where(sampled, places, torch.full_like(places, -1)).amax(dim=-1)  # [B]
    is_longest, second = lead_of_the_best(last.to(torch.float64), group, len(count))
    is_longest = is_longest & (count > 1)[group]
    return sampled & is_longest[:, None] & (places > second[group][:, None])
