"""Advantages of all rows of a step, from their columns: the formulas are in strop.algorithms.

They need all rows at once (groups, whitening) but no token ids: one worker computes them from light columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from strop.algorithms.advantages import adv_estimator_columns, estimate_advantages, group_ids_of
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.reward_kl import apply_kl_penalty
from strop.algorithms.sequence_credit import (
    episode_representatives,
    spread_over_sequences,
    with_answer_scores,
)
from strop.protocol import DataProto, columns
from strop.protocol.columns import padded

OFFERED = frozenset({"reward_baselines", "old_log_probs", "sum_pi_squared", "rollout_is_weights"})
"""Columns that an estimator in verl's convention gets, where there are any."""


def compute_advantages(data: DataProto, algorithm: AlgorithmConfig, *, kl_coef: float = 0.0) -> DataProto:
    """Columns advantages, returns and token_level_rewards [B, R~] of all rows of a step.

    Rewards are the scores, with a reward model's on the last token, less the KL penalty; of an episode of several rows
    one row is compared with other samples (`sequence_credit`).

    Args:
        data: response_mask and token_level_scores [B, R~]; loss_mask [B, R~] where the rollout was corrected: what it
            rejects has no advantage; rm_scores [B] with a reward model; old_log_probs and ref_log_prob [B, R~] with KL
            in the reward; values [B, R~] and what else the estimator declares; uid [B], equal for rows of one prompt,
            and episode_id [B], equal for rows of one episode (without it each row is one).
        algorithm: the estimator and its settings.
        kl_coef: factor of the KL penalty in this step.

    Raises:
        ValueError: a column is missing, or a number is not finite.
    """
    tensors, uids = data.tensors(), list(data.non_tensor_batch["uid"])
    mask = padded(tensors, "loss_mask" if "loss_mask" in tensors else "response_mask").bool()
    lengths = columns.row_lengths(tensors["response_mask"])
    scores = padded(tensors, "token_level_scores")
    rewards = with_answer_scores(scores, lengths, tensors.get("rm_scores"))
    if algorithm.use_kl_in_reward:
        rewards = apply_kl_penalty(rewards, tensors, algorithm, mask, kl_coef)

    representatives = episode_representatives(list(data.non_tensor_batch.get("episode_id", ())), mask)
    rows = slice(None) if representatives is None else representatives[0]
    names = uids if representatives is None else [uids[row] for row in representatives[0]]
    advantages, returns = estimate_advantages(
        algorithm.adv_estimator,
        token_level_rewards=rewards[rows],
        response_mask=mask[rows],
        group_ids=group_ids_of(names),
        settings={
            "norm_by_std": algorithm.norm_adv_by_std,
            "gamma": algorithm.gamma,
            "lam": algorithm.lam,
            "reward_weights": algorithm.reward_weights,
            **algorithm.adv_settings,
        },
        columns=_estimator_columns(tensors, algorithm, added=rewards - scores, rows=rows),
        algorithm=algorithm,
        uids=names,
    )
    advantages, returns = advantages.to(rewards.dtype), returns.to(rewards.dtype)
    if representatives is not None:
        advantages, returns = spread_over_sequences(advantages, returns, mask, *representatives)

    inside = torch.arange(rewards.shape[1])[None] < lengths[:, None]
    return DataProto.from_dict(
        {
            "advantages": columns.from_padded(advantages, inside),
            "returns": columns.from_padded(returns, inside),
            "token_level_rewards": columns.from_padded(rewards, inside),
        }
    )


def _estimator_columns(
    tensors: Mapping[str, Tensor], algorithm: AlgorithmConfig, *, added: Tensor, rows: list[int] | slice
) -> dict[str, Tensor]:
    """Columns of these rows that the estimator takes; `added` [B, R] is what rewards have beyond the scores."""
    names = adv_estimator_columns(algorithm.adv_estimator) | OFFERED
    inputs = {name: padded(tensors, name)[rows] for name in names if name in tensors}
    if "turn_rewards" in inputs:  # a penalty or a reward model's word is of the answer it is on
        inputs["turn_rewards"] = inputs["turn_rewards"] + added[rows].sum(dim=-1)
    return inputs
