"""Further estimators that compare the samples of a prompt: one number per response, the same on all its tokens.

What `grpo_advantages` says of shapes, zeros and errors holds for all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.advantages.groups import STD_EPS, center_groups, expand_to_tokens, group_std
from strop.algorithms.advantages.registration import implements_outcome


@implements_outcome("rloo", "rloo_vectorized")
def rloo_advantages(rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Reward minus the mean reward of the other samples of the prompt, constant over a response.

    A_i = r_i - mean of r_j over j != i in the group = (r_i - mean_g) * K / (K - 1).

    Source: Ahmadian et al. 2024, arXiv:2402.14740.

    Deviations: of verl's two implementations, one gives a group of one its raw reward and the other 0;
        here it is 0 under both names.
    """
    centered, group, count = center_groups(rewards, group_ids)
    factor = count / (count - 1).clamp(min=1)  # [G]
    return expand_to_tokens(centered * factor[group], response_mask)


@implements_outcome("grpo_passk")
def grpo_passk_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    *,
    norm_by_std: bool = True,
) -> Tensor:
    """Credit for the best sample of a group alone, by its lead over the second: the rest has 0.

    A_best = (r_best - r_second) / (std_g + STD_EPS), without `norm_by_std` only the numerator. Two best samples
    have no lead: the whole group has 0.

    Source: Tang et al. 2025, arXiv:2503.19595, the leave-one-out gradient of the expected best of K samples.
        Division by the standard deviation is not in the paper; it is the habit of implementations.

    Deviations: a group of one is an error elsewhere; here it has 0, as under every other estimator.
    """
    centered, group, count = center_groups(rewards, group_ids)
    leads, second = lead_of_the_best(rewards, group, len(count))
    leads = leads & (count > 1)[group]
    lead = torch.where(leads, rewards - second[group], torch.zeros_like(rewards))  # [B]
    if norm_by_std:
        lead = lead / (group_std(centered, group, count)[group] + STD_EPS)
    return expand_to_tokens(lead, response_mask)


@implements_outcome("opo")
def opo_advantages(rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Reward minus the group's mean reward weighted by response length.

    A_i = r_i - sum_j len_j r_j / sum_j len_j over the group, with len the number of sampled tokens: the
    baseline of least variance if the gradient's squared norm grows with the length.

    Source: Hao et al. 2025, arXiv:2505.23585.
    """
    centered, group, count = center_groups(rewards, group_ids)
    lengths = response_mask.bool().sum(dim=-1).to(rewards.dtype)  # [B]
    zero = torch.zeros_like(count)  # [G]
    # Groups without a token have no token to give an advantage to, so their divisor does not matter.
    total_length = zero.index_add(0, group, lengths).clamp(min=1)  # [G]
    baseline = zero.index_add(0, group, lengths * centered) / total_length  # [G]
    return expand_to_tokens(centered - baseline[group], response_mask)


EQUAL = 1e-9
"""Share of the largest reward below which a reward or a difference is rounding: a KL penalty is that before the first
update."""


@implements_outcome("gpg")
def gpg_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    *,
    f_norm: float = 1.0,
    count_mixed_groups: bool = False,
) -> Tensor:
    """Centered rewards, scaled up for the samples of the batch that teach nothing.

    A_i = alpha (r_i - mean_g) / f_norm with alpha = B / max(1, M), over a batch of B samples.

    Args:
        rewards: [B]; group_ids: [B]; response_mask: [B, R].
        f_norm: a constant divisor, in reward units.
        count_mixed_groups: what M counts. False: samples whose reward is not 0, as implementations do. True:
            samples of groups whose rewards differ, as the paper does: B / (B - number without gradient).

    Raises:
        ValueError: f_norm is not above 0, or a reward is NaN or infinite.

    Source: Chu et al. 2025, arXiv:2504.02546, accurate gradient estimation. Alpha needs the whole batch, so
        the result of two batches joined is not the two results joined.
    """
    if not f_norm > 0:
        raise ValueError(f"f_norm is {f_norm}, but it divides the rewards: use a number above 0, such as 1.0")
    centered, group, count = center_groups(rewards, group_ids)
    least = EQUAL * rewards.abs().max() if len(rewards) else 0.0
    if count_mixed_groups:
        width = torch.zeros_like(count).index_add(0, group, centered.abs())  # [G]
        counted = (width > least)[group].sum()
    else:
        counted = (rewards.abs() > least).sum()
    alpha = len(rewards) / counted.clamp(min=1).to(rewards.dtype)
    return expand_to_tokens(centered * (alpha / f_norm), response_mask)


@implements_outcome("maxrl")
def maxrl_advantages(rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """Centered rewards divided by the group's mean: hard prompts weigh as they do in maximum likelihood.

    A_i = (r_i - mean_g) / mean_g, and 0 in a group whose rewards are all 0. With rewards 0 and 1 the mean over a
    group estimates the gradient of log P(success), cut after the K-th term of its series in P(failure). No
    advantage is above K - 1.

    Raises:
        ValueError: a reward is negative, NaN or infinite.

    Source: maximum-likelihood RL, arXiv:2602.02710. We take the variant with the mean as baseline. The small
        number that implementations add to the divisor is left out: a mean above 0 needs none.
    """
    centered, _, _ = center_groups(rewards, group_ids)
    if (rewards < 0).any():
        rows = (rewards < 0).nonzero()[:, 0].tolist()
        raise ValueError(
            f"maxrl divides by the mean reward of a group, which needs rewards of at least 0, but those of rows "
            f"{rows[:8]} are negative (lowest {rewards.min().item():g}): use rewards between 0 and 1 and no KL in "
            f"the reward, or another estimator such as grpo"
        )
    mean = rewards - centered  # [B]
    return expand_to_tokens(torch.where(mean > 0, centered / mean, torch.zeros_like(centered)), response_mask)


def lead_of_the_best(values: Tensor, group: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """Mask of the samples that alone have the largest value of their group [B] bool, and the second-largest value [G].

    Of a group of one, the second-largest is -inf. Two samples that share the largest value: neither is alone.
    """
    nothing = torch.full((num_groups,), -torch.inf, dtype=values.dtype, device=values.device)  # [G]
    highest = nothing.scatter_reduce(0, group, values, "amax")  # [G]
    is_best = values == highest[group]  # [B]
    num_best = torch.zeros_like(nothing).index_add(0, group, is_best.to(values.dtype))  # [G]
    rest = torch.where(is_best, nothing[group], values)  # [B]
    second = nothing.scatter_reduce(0, group, rest, "amax")  # [G]
    return is_best & (num_best == 1)[group], second
