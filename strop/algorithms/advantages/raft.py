"""The estimator of rejection sampling: every sample that is trained on counts the same."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.advantages.groups import expand_to_tokens, require_finite
from strop.algorithms.advantages.registration import implements_outcome


@implements_outcome("raft")
def raft_advantages(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Advantage 1 for every sample, whatever its reward: which samples are trained on is what rewards decide.

    With `algorithm.keep` and the loss gpg this is maximum likelihood of the samples that were kept.

    Args:
        rewards: [B] floating point.
        response_mask: [B, R], true on tokens the policy sampled.

    Returns:
        [B, R]: 1 where response_mask is true, else 0.

    Raises:
        ValueError: a reward is NaN or infinite.

    Source: Dong et al. 2023, arXiv:2304.06767, step 3.
    """
    require_finite(rewards)
    return expand_to_tokens(torch.ones_like(rewards), response_mask)
