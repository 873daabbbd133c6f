"""From episodes to a training batch: columns, advantages, optimizer batches with their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from strop.algorithms.advantages import estimate_advantages, group_ids_of
from strop.algorithms.aggregation import batch_totals, token_weights
from strop.algorithms.config import AlgorithmConfig
from strop.protocol import DataProto, columns
from strop.trainer.rollouts import Episode


def make_batch(episodes: Sequence[Episode], rewards: Sequence[float], *, temperature: float) -> DataProto:
    """One row per episode, in order. All episodes have a trajectory with at least one response token.

    Columns: prompts [B, P~], responses, response_mask, rollout_log_probs, token_level_scores and
    token_level_rewards [B, R~] (the reward on the last response token); uid and id beside them.
    """
    trajectories = [episode.trajectory for episode in episodes if episode.trajectory is not None]
    assert len(trajectories) == len(episodes) == len(rewards), "failed episodes were left out before"
    token_rewards = []
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        row = torch.zeros(len(trajectory.response_ids))
        row[-1] = reward
        token_rewards.append(row)
    scores = columns.jagged(token_rewards)
    batch = DataProto.from_dict(
        {
            "prompts": columns.jagged([torch.tensor(t.prompt_ids) for t in trajectories]),
            "responses": columns.jagged([torch.tensor(t.response_ids) for t in trajectories]),
            "response_mask": columns.jagged([torch.tensor(t.sampled) for t in trajectories]),
            "rollout_log_probs": columns.jagged([torch.tensor(t.log_probs) for t in trajectories]),
            "token_level_scores": scores,
            "token_level_rewards": scores.clone(),
        },
        non_tensors={
            "uid": np.array([t.uid for t in trajectories], dtype=object),
            "id": np.array([t.id for t in trajectories], dtype=object),
        },
    )
    batch.meta_info["temperature"] = temperature
    return batch


def add_advantages(batch: DataProto, algorithm: AlgorithmConfig) -> DataProto:
    """The batch with columns advantages and returns [B, R~]."""
    mask = columns.to_padded(batch.tensors()["response_mask"], False).bool()
    rewards = columns.to_padded(batch.tensors()["token_level_rewards"], 0.0)
    advantages, returns = estimate_advantages(
        algorithm.adv_estimator,
        token_level_rewards=rewards,
        response_mask=mask,
        group_ids=group_ids_of(list(batch.non_tensor_batch["uid"])),
        settings={"norm_by_std": algorithm.norm_adv_by_std},
    )
    lengths = columns.row_lengths(batch.tensors()["responses"])
    inside = torch.arange(rewards.shape[1])[None] < lengths[:, None]
    return batch.union(
        DataProto.from_dict(
            {
                "advantages": columns.from_padded(advantages, inside),
                "returns": columns.from_padded(returns, inside),
            }
        )
    )


def add_old_log_probs(batch: DataProto, algorithm: AlgorithmConfig) -> DataProto:
    """The batch with old_log_probs taken from sampling, if the configuration says so."""
    if algorithm.old_log_probs == "recompute":
        return batch
    rest = batch.select([name for name in batch.tensors() if name != "old_log_probs"])
    return rest.union(DataProto.from_dict({"old_log_probs": batch.tensors()["rollout_log_probs"]}))


def optimizer_batches(
    batch: DataProto, algorithm: AlgorithmConfig, *, samples_per_update: int, epochs: int
) -> Iterator[DataProto]:
    """The rows of each optimizer step, with loss_weights [B, R~] counted over exactly these rows."""
    for _ in range(epochs):
        for part in batch.split(samples_per_update):
            lengths = columns.row_lengths(part.tensors()["responses"])
            mask = columns.flat(part.tensors()["response_mask"]).bool()
            totals = batch_totals(mask, lengths)
            weights = token_weights(
                algorithm.loss_agg_mode,
                mask,
                num_tokens=totals.num_tokens,
                num_samples=totals.num_samples,
                scale=algorithm.loss_scale_factor,
                row_lengths=lengths,
                dtype=_precision(part),
            )
            yield part.union(DataProto.from_dict({"loss_weights": columns.from_flat(weights, lengths)}))


def _precision(batch: DataProto) -> torch.dtype:
    dtype: torch.dtype = batch.tensors()["advantages"].dtype
    return dtype
