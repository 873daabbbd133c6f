"""The implicit process reward model: its tokens' rewards, and the loss that the outcomes of its answers give it.

Its reward of a token is beta times the log-ratio between the model and its own starting weights. The sum over an
answer is the logit of the answer being right, so right and wrong are all that it is taught (Yuan et al. 2024,
arXiv:2412.01981).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def process_rewards(log_probs: Tensor, ref_log_probs: Tensor, *, beta: float) -> Tensor:
    """r_t = beta * (log pi_prm(y_t) - log pi_ref(y_t)), in the shape of its arguments."""
    return beta * (log_probs - ref_log_probs)


def pair_accuracy(scores: Tensor, rewards: Tensor, group_ids: Tensor) -> float:
    """Of the pairs of a prompt's samples with different rewards, the share in which the larger reward has the larger
    score; equal scores count half. Chance is 0.5; NaN without such a pair.

    Args:
        scores: [B], sums of process rewards.
        rewards: [B], outcomes.
        group_ids: [B] int64.
    """
    num_right, num_pairs = 0.0, 0
    for group in set(group_ids.tolist()):
        inside = group_ids == group
        score, reward = scores[inside], rewards[inside]
        better = reward[:, None] > reward[None, :]
        above = score[:, None] - score[None, :]
        num_right += float((better & (above > 0)).sum()) + 0.5 * float((better & (above == 0)).sum())
        num_pairs += int(better.sum())
    return num_right / num_pairs if num_pairs else math.nan


def outcome_terms(
    rewards: Tensor, mask: Tensor, sequences: Tensor, outcomes: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each sequence's outcome, and the sums that it is of: two tensors [S].

    s_i = sum of r_t over the sampled tokens of sequence i; term_i = -o_i log sigmoid(s_i) - (1 - o_i) log(1 -
    sigmoid(s_i)). A sequence cannot be cut: all of its tokens are here.

    Args:
        rewards: [M], of the tokens of S whole sequences, see `process_rewards`.
        mask: [M] bool, tokens that the policy sampled; the others do not matter, also where they are NaN.
        sequences: [M] int64, the sequence of each token, from 0 to S - 1.
        outcomes: [S], 1 for a right answer and 0 for a wrong one.
    """
    sampled = torch.where(mask, rewards, torch.zeros_like(rewards))
    zero = torch.zeros(outcomes.shape, dtype=rewards.dtype, device=rewards.device)
    scores = zero.index_add(0, sequences, sampled)
    terms = F.binary_cross_entropy_with_logits(scores, outcomes.to(scores), reduction="none")
    return terms, scores
