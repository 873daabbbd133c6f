"""Advantage estimators: from rewards to the credit of each token.

An estimator is a pure function of padded tensors. It is registered with the columns and settings that it
takes by keyword; `estimate_advantages` passes exactly those. Rules that hold for every estimator here:

* A reward counts wherever it sits, also on a token that the policy did not sample (a tool's reply).
* Advantages are exactly 0 outside the response mask.
* A group of one has no baseline: its advantage is 0. Equal rewards give exactly 0, whatever their rounding.
* Values outside the mask never matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor

from strop.algorithms.masked import masked_whiten
from strop.algorithms.registry import Declaration, Registry

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]

ADV_ESTIMATOR_REGISTRY: Registry[AdvantageFn] = Registry("advantage estimator", replaceable=False)
register_adv_est = ADV_ESTIMATOR_REGISTRY.register
"""Decorator: `@register_adv_est(name, needs=[...], settings=[...], group_relative=True)`."""


def get_adv_estimator_fn(name: str | Enum) -> AdvantageFn:
    """The function registered under `name`; ValueError with the known names if there is none."""
    return ADV_ESTIMATOR_REGISTRY[str(name.value) if isinstance(name, Enum) else name]


def adv_estimator_declaration(name: str | Enum) -> Declaration:
    """The columns and settings that the estimator under `name` asks for."""
    return ADV_ESTIMATOR_REGISTRY.declaration(name)


def check_estimator(
    name: str, *, samples_per_prompt: int, norm_by_std: bool = True, gamma: float = 1.0, lam: float = 1.0
) -> None:
    """Refuse, before anything heavy starts, a configuration under which the estimator cannot teach.

    Raises:
        ValueError: unknown name; one sample per prompt with a group-relative estimator; a setting other than
            its default that the estimator does not have.
    """
    declaration = adv_estimator_declaration(name)
    if declaration.is_group_relative and samples_per_prompt < 2:
        alternatives = sorted(
            other
            for other in ADV_ESTIMATOR_REGISTRY
            if not adv_estimator_declaration(other).is_group_relative
        )
        raise ValueError(
            f"rollout.samples_per_prompt is {samples_per_prompt}, but algorithm.adv_estimator={name} "
            f"compares the samples of one prompt and would give advantage 0 to each: set "
            f"rollout.samples_per_prompt to at least 2, or use an estimator without groups "
            f"({', '.join(alternatives)})"
        )
    given = {"norm_by_std": not norm_by_std, "gamma": gamma != 1.0, "lam": lam != 1.0}
    for setting, is_set in given.items():
        if is_set and declaration.needs and setting not in declaration.settings:
            key = "norm_adv_by_std" if setting == "norm_by_std" else setting
            users = sorted(
                other
                for other in ADV_ESTIMATOR_REGISTRY
                if setting in adv_estimator_declaration(other).settings
            )
            raise ValueError(
                f"algorithm.{key} is set, but algorithm.adv_estimator={name} has no such setting: remove it, "
                f"or use {' or '.join(users)}"
            )


def estimate_advantages(
    name: str,
    *,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    settings: Mapping[str, float],
    columns: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, R] of the estimator `name`, given what it declared.

    Args:
        token_level_rewards: [B, R], 0 where there is no reward; `rewards` [B] is its sum over R.
        response_mask: [B, R], true on tokens the policy sampled.
        group_ids: [B] int64, equal for samples of one prompt (see `group_ids_of`).
        settings: numbers and switches by name; those the estimator did not declare are not passed.
        columns: further columns by name (values, ref_log_probs, reward_baselines, ...).

    Raises:
        ValueError: unknown name, no declaration, a missing column, or rewards that are not finite.
    """
    function, declaration = get_adv_estimator_fn(name), adv_estimator_declaration(name)
    if not declaration.needs:
        raise ValueError(
            f"advantage estimator {name!r} declares no columns: register it with "
            f"@register_adv_est({name!r}, needs=[...]) so that strop knows what to pass"
        )
    available: dict[str, Tensor] = {
        **(columns or {}),
        "token_level_rewards": token_level_rewards,
        "rewards": token_level_rewards.sum(dim=-1),
        "response_mask": response_mask,
        "group_ids": group_ids,
    }
    missing = sorted(declaration.needs - available.keys())
    if missing:
        raise ValueError(
            f"advantage estimator {name!r} needs the columns {', '.join(missing)}, but the batch has "
            f"{', '.join(sorted(available))}"
        )
    arguments: dict[str, Tensor | float] = {key: available[key] for key in declaration.needs}
    arguments.update({key: value for key, value in settings.items() if key in declaration.settings})
    with torch.no_grad():
        return function(**arguments)


def group_ids_of(uids: Sequence[str]) -> Tensor:
    """[B] int64: equal numbers for equal uids, counted up in the order of first appearance."""
    numbers: dict[str, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=torch.int64)


def grpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    *,
    norm_by_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Group-relative advantages, constant over the tokens of a response.

    A_i = (r_i - mean_g) / (std_g + eps), over the group g of sample i; without `norm_by_std` only the
    numerator, which is the advantage of Dr. GRPO.

    Args:
        rewards: [B] floating point, one outcome reward per sample, any unit.
        group_ids: [B] int64, equal for samples of one prompt, in any order.
        response_mask: [B, R], true on tokens the policy sampled.
        norm_by_std: divide by the group's standard deviation.
        eps: added to the standard deviation, in reward units.

    Returns:
        [B, R] in the dtype of `rewards`; 0 where response_mask is false, in groups of one, and in groups
        whose rewards are equal.

    Raises:
        ValueError: a reward is NaN or infinite.

    Source: Shao et al. 2024, arXiv:2402.03300, outcome supervision. The paper leaves the kind of standard
        deviation open; we take the sample one (divide by K - 1), as is common. Without it: Liu et al.
        2025, arXiv:2503.20783.
    """
    centered, group, count = _center_groups(rewards, group_ids)
    if norm_by_std:
        squares = torch.zeros_like(count).index_add(0, group, centered.square())  # [G]
        std = (squares / (count - 1).clamp(min=1)).sqrt()  # [G]
        centered = centered / (std[group] + eps)
    return _spread(centered, response_mask)


def rloo_advantages(rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Reward minus the mean reward of the other samples of the prompt, constant over a response.

    A_i = r_i - mean of r_j over j != i in the group = (r_i - mean_g) * K / (K - 1).

    Shapes and errors as in `grpo_advantages`.

    Source: Ahmadian et al. 2024, arXiv:2402.14740.
    """
    centered, group, count = _center_groups(rewards, group_ids)
    factor = count / (count - 1).clamp(min=1)  # [G]
    return _spread(centered * factor[group], response_mask)


def reward_to_go(token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float) -> Tensor:
    """[B, R]: rewards from each sampled token on, discounted once per sampled token; 0 outside the mask.

    G_t = r_t + gamma * G_next, over sampled tokens. The reward of a token that was given (a tool's reply) is
    part of r_t of the last sampled token before it; one before every sampled token has nobody to credit.

    Raises:
        ValueError: a reward is NaN or infinite.
    """
    _require_finite(token_level_rewards)
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
    _require_finite(token_level_rewards)
    sampled = response_mask.bool()
    if not torch.isfinite(values[sampled]).all():
        raise ValueError(
            "the critic gave a value that is NaN or infinite for a sampled token; look at its loss"
        )
    zero = torch.zeros_like(token_level_rewards[:, 0])  # [B]
    next_value, next_advantage, pending = zero, zero, zero
    advantages = torch.zeros_like(token_level_rewards)  # [B, R]
    for t in reversed(range(token_level_rewards.shape[1])):
        here = sampled[:, t]
        reward = token_level_rewards[:, t] + pending
        delta = reward + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(here, advantage, zero)
        next_advantage = torch.where(here, advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        pending = torch.where(here, zero, reward)
    return advantages


@register_adv_est(
    "gae",
    needs=("token_level_rewards", "values", "response_mask"),
    settings=("gamma", "lam"),
)
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
        ValueError: a number is not finite, or fewer than two tokens were sampled, which have no variance to
            whiten by.
    """
    advantages = gae_advantages(token_level_rewards, values, response_mask, gamma=gamma, lam=lam)
    returns = torch.where(response_mask.bool(), advantages + values, torch.zeros_like(values))
    return masked_whiten(advantages, response_mask), returns


@register_adv_est(
    "grpo",
    needs=("rewards", "group_ids", "response_mask"),
    settings=("norm_by_std",),
    group_relative=True,
)
def grpo(
    *, rewards: Tensor, group_ids: Tensor, response_mask: Tensor, norm_by_std: bool = True
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of `grpo_advantages`; the two are equal."""
    advantages = grpo_advantages(rewards, group_ids, response_mask, norm_by_std=norm_by_std)
    return advantages, advantages


@register_adv_est("rloo", needs=("rewards", "group_ids", "response_mask"), group_relative=True)
def rloo(*, rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns of `rloo_advantages`; the two are equal."""
    advantages = rloo_advantages(rewards, group_ids, response_mask)
    return advantages, advantages


@register_adv_est("reinforce_plus_plus", needs=("token_level_rewards", "response_mask"), settings=("gamma",))
def reinforce_plus_plus(
    *, token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Reward-to-go whitened over all sampled tokens of the batch, and the reward-to-go itself.

    Raises:
        ValueError: a reward is not finite, or fewer than two tokens were sampled.

    Source: Hu 2025, arXiv:2501.03262.
    """
    returns = reward_to_go(token_level_rewards, response_mask, gamma=gamma)
    return masked_whiten(returns, response_mask), returns


def _center_groups(rewards: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards minus their group's mean [B], group numbers 0..G-1 [B], and group sizes [G].

    The smallest reward of a group is taken off before the mean, which changes nothing in exact arithmetic
    and makes equal rewards give exactly 0: eight rewards of 0.1 do not sum to 0.8 in floating point, and
    the rest, divided by a standard deviation of about 0, would be an advantage out of nothing.
    """
    _require_finite(rewards)
    _, group = torch.unique(group_ids, return_inverse=True)  # [B]
    count = torch.bincount(group).to(rewards.dtype)  # [G]
    lowest = torch.full_like(count, torch.inf).scatter_reduce(0, group, rewards, "amin")  # [G]
    shifted = rewards - lowest[group]  # [B]
    total = torch.zeros_like(count).index_add(0, group, shifted)  # [G]
    return shifted - (total / count)[group], group, count


def _spread(per_sample: Tensor, response_mask: Tensor) -> Tensor:
    """[B] to [B, R]: each sample's value on its sampled tokens, 0 elsewhere."""
    zero = torch.zeros((), dtype=per_sample.dtype, device=per_sample.device)
    return torch.where(response_mask.bool(), per_sample[:, None], zero)


def _require_finite(rewards: Tensor) -> None:
    if not rewards.is_floating_point():
        raise ValueError(f"rewards have dtype {rewards.dtype}: convert them with rewards.float()")
    if not torch.isfinite(rewards).all():
        bad = sorted(set((~torch.isfinite(rewards)).nonzero()[:, 0].tolist()))
        raise ValueError(
            f"rewards must be finite, but those of rows {bad[:8]} are not; check the reward function"
        )
