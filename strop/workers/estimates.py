"""Advantages of a batch, from its columns: the formulas are in strop.algorithms.

They need all rows at once (groups, whitening) but no token ids: they run in one worker, on light columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from strop.algorithms.advantages import adv_estimator_columns, estimate_advantages, group_ids_of
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.reward_kl import penalized
from strop.algorithms.sequence_credit import (
    episode_representatives,
    spread_over_sequences,
    with_answer_scores,
)
from strop.protocol import columns
from strop.protocol.columns import padded

OFFERED = frozenset({"reward_baselines", "old_log_probs", "sum_pi_squared", "rollout_is_weights"})
"""Columns that an estimator in verl's convention gets, where there are any."""


def batch_advantages(
    tensors: Mapping[str, Tensor],
    algorithm: AlgorithmConfig,
    *,
    uids: Sequence[str],
    episode_ids: Sequence[str] = (),
    kl_coef: float,
) -> dict[str, Tensor]:
    """Columns advantages, returns and token_level_rewards [B, R~] of all rows of a step.

    The formulas are those of the penalties on tokens, of the estimator, and of `sequence_credit`.

    Args:
        tensors: response_mask and token_level_scores [B, R~]; loss_mask [B, R~] where the rollout was corrected: what
            it rejects has no advantage; rm_scores [B] with a reward model; old_log_probs and ref_log_prob [B, R~]
            with KL in the reward; values [B, R~] and what else the estimator declares.
        algorithm: the estimator and its settings.
        uids: equal for rows of one prompt.
        episode_ids: equal for rows of one episode; none where each row is one.
        kl_coef: coefficient of the KL penalty in this step.

    Raises:
        ValueError: a column is missing, a number is not finite, or there are too few tokens to whiten.
    """
    mask = padded(tensors, "loss_mask" if "loss_mask" in tensors else "response_mask").bool()
    lengths = columns.row_lengths(tensors["response_mask"])
    rewards = with_answer_scores(padded(tensors, "token_level_scores"), lengths, tensors.get("rm_scores"))
    rewards = penalized(rewards, tensors, algorithm, mask, kl_coef)
    representatives = episode_representatives(episode_ids, mask)
    if representatives is None:
        advantages, returns = _estimated(tensors, algorithm, rewards, mask, uids, slice(None))
    else:
        rows, representative_of = representatives
        chosen = [uids[row] for row in rows]
        advantages, returns = _estimated(tensors, algorithm, rewards[rows], mask[rows], chosen, rows)
        advantages, returns = spread_over_sequences(advantages, returns, mask, rows, representative_of)
    inside = torch.arange(rewards.shape[1])[None] < lengths[:, None]
    return {
        "advantages": columns.from_padded(advantages, inside),
        "returns": columns.from_padded(returns, inside),
        "token_level_rewards": columns.from_padded(rewards, inside),
    }


def _estimated(
    tensors: Mapping[str, Tensor],
    algorithm: AlgorithmConfig,
    rewards: Tensor,
    mask: Tensor,
    uids: Sequence[str],
    rows: list[int] | slice,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B', R] of some rows, by the configured estimator."""
    taken = adv_estimator_columns(algorithm.adv_estimator) | OFFERED
    found = {name: padded(tensors, name)[rows] for name in taken if name in tensors}
    if "turn_rewards" in found:  # a penalty or a reward model's word is of the answer it is on
        added = rewards - padded(tensors, "token_level_scores")[rows]
        found["turn_rewards"] = found["turn_rewards"] + added.sum(dim=-1)
    advantages, returns = estimate_advantages(
        algorithm.adv_estimator,
        token_level_rewards=rewards,
        response_mask=mask,
        group_ids=group_ids_of(uids),
        settings={
            "norm_by_std": algorithm.norm_adv_by_std,
            "gamma": algorithm.gamma,
            "lam": algorithm.lam,
            "reward_weights": algorithm.reward_weights,
            **algorithm.adv_settings,
        },
        columns=found,
        algorithm=algorithm,
        uids=uids,
    )
    return advantages.to(rewards.dtype), returns.to(rewards.dtype)
