"""The loss of the loop: PPO's clipped ratio, per token. The framework weighs and adds the tokens."""

import torch

from strop.algorithms.losses import PolicyLossTerms, register_policy_loss


@register_policy_loss("clipped_ratio", needs=["log_probs", "old_log_probs", "advantages"])
def clipped_ratio(log_probs, old_log_probs, advantages):
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
    clipped = ratio.clamp(0.8, 1.2)
    terms = -torch.minimum(ratio * advantages, clipped * advantages)
    return PolicyLossTerms(terms=terms, statistics={"pg_clipfrac": (ratio != clipped).float()})
