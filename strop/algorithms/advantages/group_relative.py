"""Estimators that compare the samples of a prompt: one number per response, the same on all its tokens.

Each is a function of total rewards [B]; the returns are the advantages. What `grpo_advantages` says of shapes, zeros
and errors holds for all of them.
"""

from __future__ import annotations

from torch import Tensor

from strop.algorithms.advantages.groups import center_groups, expand_to_tokens, normalize_groups
from strop.algorithms.advantages.registration import implements_outcome


@implements_outcome("grpo", "grpo_vectorized")
def grpo_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    *,
    norm_by_std: bool = True,
) -> Tensor:
    """Group-relative advantages, constant over the tokens of a response.

    A_i = (r_i - mean_g) / (std_g + STD_EPS), over the group g of sample i; without `norm_by_std` only the
    numerator, which is the advantage of Dr. GRPO.

    Args:
        rewards: [B] floating point, one outcome reward per sample, any unit.
        group_ids: [B] int64, equal for samples of one prompt, in any order.
        response_mask: [B, R], true on tokens the policy sampled.
        norm_by_std: divide by the group's standard deviation.

    Returns:
        [B, R] in the dtype of `rewards`; 0 where response_mask is false, in groups of one, and in groups
        whose rewards are equal.

    Raises:
        ValueError: a reward is NaN or infinite.

    Source: Shao et al. 2024, arXiv:2402.03300, outcome supervision. The paper leaves the kind of standard
        deviation open; we take the sample one (divide by K - 1), as is common. Without it: Liu et al.
        2025, arXiv:2503.20783.

    Deviations: the usual implementations give a group of one its raw reward, and equal rewards that are not
        representable (eight times 0.1) an advantage made of rounding; both are 0 here.
    """
    if norm_by_std:
        scaled, _, _ = normalize_groups(rewards, group_ids)
    else:
        scaled, _, _ = center_groups(rewards, group_ids)
    return expand_to_tokens(scaled, response_mask)


@implements_outcome("dr_grpo")
def dr_grpo_advantages(rewards: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """`grpo_advantages` without the standard deviation: A_i = r_i - mean_g.

    Source: Liu et al. 2025, arXiv:2503.20783. Its second half, a constant divisor in place of the response
        length, is the aggregation mode seq-mean-token-sum-norm.
    """
    return grpo_advantages(rewards, group_ids, response_mask, norm_by_std=False)
