"""The plain policy gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.algorithms.losses.terms import PolicyLossTerms, implements, probability_ratio, ratio_statistics


@implements("gpg", "reinforce")
def policy_gradient_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> PolicyLossTerms:
    """The plain policy gradient: term = -A * log_probs.

    GPG is this loss under the advantages of the same name. The old policy enters the statistics only, so
    more than one optimizer step per batch of samples is biased; importance weights correct for it.

    Args:
        log_probs: with gradient; any shape, that of all columns.

    Returns:
        Terms, and the statistics ppo_kl and ratio.

    Source: Williams 1992 (REINFORCE); Chu et al. 2025, arXiv:2504.02546 (GPG).
    """
    log_ratio = log_probs - old_log_probs
    with torch.no_grad():
        ratio = probability_ratio(log_ratio)
    return PolicyLossTerms(terms=-advantages * log_probs, statistics=ratio_statistics(log_ratio, ratio))
