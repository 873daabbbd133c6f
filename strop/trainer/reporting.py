"""The numbers and sentences of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from strop.algorithms.advantages import group_ids_of
from strop.algorithms.reduce import Reduction, merge_metrics
from strop.protocol import DataProto, columns
from strop.trainer import metrics as measure
from strop.trainer.config import Config
from strop.trainer.rollouts import Episode

Say = Callable[[str], None]
"""Takes one line for the person who watches."""


def merge_ranks(metrics: Mapping[str, Sequence[Reduction]]) -> dict[str, Reduction]:
    """One value per key from the lists that joining the ranks' results made."""
    return merge_metrics(
        dict(zip(metrics, values, strict=True)) for values in zip(*metrics.values(), strict=True)
    )


def num_response_tokens(episodes: Sequence[Episode]) -> int:
    """Tokens of all responses."""
    return sum(len(e.trajectory.response_ids) for e in episodes if e.trajectory is not None)


def num_tokens(episodes: Sequence[Episode]) -> int:
    """Tokens of all prompts and responses."""
    return sum(len(e.trajectory.token_ids) for e in episodes if e.trajectory is not None)


def episode_metrics(episodes: Sequence[Episode], config: Config) -> dict[str, float]:
    """Lengths, turns and outcomes of the played episodes."""
    trajectories = [e.trajectory for e in episodes if e.trajectory is not None]
    return {
        **measure.length_metrics(
            prompt_lengths=[len(t.prompt_ids) for t in trajectories],
            response_lengths=[len(t.response_ids) for t in trajectories],
            is_aborted=[t.stop_reason == "aborted" for t in trajectories],
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=config.data.max_response_tokens,
        ),
        **measure.turn_metrics([t.num_turns for t in trajectories]),
        **measure.reward_outcome_metrics([e.outcome.kind for e in episodes if e.outcome is not None]),
        "rollout/failed": float(len(episodes) - len(trajectories)),
    }


def batch_metrics(batch: DataProto, log_probs: Tensor) -> dict[str, float]:
    """Rewards, advantages, groups, and the mismatch of rollout and trainer, of the trained rows.

    Args:
        batch: with its advantages.
        log_probs: [N] the trainer's log-probs at the start of the step, flat.
    """
    tensors = batch.tensors()
    mask = columns.flat(tensors["response_mask"])
    scores = torch.stack([row.sum() for row in columns.rows(tensors["token_level_scores"])])
    rewards = torch.stack([row.sum() for row in columns.rows(tensors["token_level_rewards"])])
    return {
        **measure.critic_metrics(
            scores=scores,
            rewards=rewards,
            advantages=columns.flat(tensors["advantages"]),
            returns=columns.flat(tensors["returns"]),
            response_mask=mask,
        ),
        **measure.group_metrics(rewards, group_ids_of(list(batch.non_tensor_batch["uid"]))),
        **measure.mismatch_metrics(
            log_probs,
            columns.flat(tensors["rollout_log_probs"]),
            mask,
            row_lengths=columns.row_lengths(tensors["responses"]),
        ),
    }


def no_signal(numbers: Mapping[str, float], config: Config) -> str:
    """A sentence when no group of the step can teach anything; empty otherwise."""
    if numbers.get("rollout/groups_mixed", 1.0) > 0 or numbers.get("rollout/groups_single", 0.0) == 1:
        return ""
    clipped = numbers.get("response_length/clip_ratio", 0.0)
    sentence = (
        f"no learning signal: {100 * clipped:.0f} % of answers hit data.max_response_tokens="
        f"{config.data.max_response_tokens}; groups all-zero {100 * numbers['rollout/groups_all_min']:.0f} %, all-one "
        f"{100 * numbers['rollout/groups_all_max']:.0f} %"
    )
    if clipped > 0.5:
        return sentence + " - raise data.max_response_tokens, or teach the model to stop (strop sft)"
    return (
        sentence
        + " - look at the answers; the task is too hard or too easy for this model, or the scorer is wrong"
    )
