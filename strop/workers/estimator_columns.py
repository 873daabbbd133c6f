"""Columns that some estimators take: of single answers (GiGPO), parts of rewards (GDPO)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from strop.algorithms.advantages.anchor_groups import anchor_ids
from strop.protocol import DataProto
from strop.protocol.trajectory import Trajectory
from strop.utils.sanitize import finite
from strop.workers.episodes import Episode, rewards_onward, turn_score

logger = logging.getLogger(__name__)


def own_rewards(sequences: Sequence[Trajectory], reward: float, *, turn_weight: float = 1.0) -> list[float]:
    """Reward that each training sequence of an episode earned by itself; where they stand alone, they add up to its
    reward.

    What is no answer's own (a penalty on length, a change by algorithm.reward_shaping) is the last one's.

    Args:
        sequences: of one episode, in order.
        reward: of the episode, after weights and penalties.
        turn_weight: of the rewards of single answers, the weight that `reward` has already.
    """
    worth = rewards_onward(sequences, reward, turn_weight=turn_weight)
    return [
        turn_score(sequence, turn_weight=turn_weight)
        if sequence.stands_alone and number < len(sequences) - 1
        else worth[number]
        for number, sequence in enumerate(sequences)
    ]


def step_columns(
    episodes: Sequence[Episode], rewards: Sequence[float], *, turn_weight: float, similarity: float
) -> DataProto:
    """The columns that STEP_COLUMNS names [B], for the rows of `episode_rows`.

    Args:
        episodes, rewards, turn_weight: as of `episode_rows`; all samples of a prompt are among them.
        similarity: see `strop.algorithms.advantages.anchor_groups.anchor_ids`.
    """
    sequences = [sequence for episode in episodes for sequence in episode.sequences]
    anchors = anchor_ids(
        [sequence.anchor for sequence in sequences],
        [sequence.uid for sequence in sequences],
        similarity=similarity,
    )
    turns = [number for episode in episodes for number in range(len(episode.sequences))]
    answer_rewards = [
        value
        for episode, reward in zip(episodes, rewards, strict=True)
        for value in own_rewards(episode.sequences, reward, turn_weight=turn_weight)
    ]
    return DataProto.from_dict(
        {
            "sample_index": torch.tensor(
                [sequence.sample_index for sequence in sequences], dtype=torch.int64
            ),
            "turn_index": torch.tensor(turns, dtype=torch.int64),
            "turn_rewards": torch.tensor(answer_rewards, dtype=torch.float64),
            "anchor_ids": torch.tensor(anchors, dtype=torch.int64),
        }
    )


def part_columns(episodes: Sequence[Episode], keys: Sequence[str]) -> DataProto:
    """Column reward_parts [B, K], for the rows of `episode_rows`; errors as of `reward_parts`."""
    parts = torch.tensor([reward_parts(episode, keys) for episode in episodes])
    column = parts.reshape(len(episodes), len(keys))  # also without samples
    return DataProto.from_dict({"reward_parts": column})


def reward_parts(episode: Episode, keys: Sequence[str]) -> list[float]:
    """The named parts of a sample's reward; `score` is the score itself.

    Raises:
        ValueError: the reward function returned no such number for this sample.
    """
    outcome = episode.outcome
    if outcome is None or outcome.score is None:  # trained with reward.failed_score, whatever the part
        return [0.0 if outcome is None or outcome.fallback_score is None else outcome.fallback_score] * len(
            keys
        )
    values: dict[str, float | str | bool] = {**outcome.parts, "score": outcome.score}
    for key in keys:
        if key not in values or isinstance(values[key], str):
            raise ValueError(
                f"algorithm.reward_keys names {key!r}, but the reward function gave sample {episode.id} no such "
                f"number: it returned {', '.join(sorted(values))}. Return it for every sample"
            )
    numbers = [finite(values[key]) for key in keys]
    if None in numbers:
        logger.warning(
            "sample %s: a part of algorithm.reward_keys is no finite number (%s), so 0 stands in its place",
            episode.id, ", ".join(f"{key}: {values[key]}" for key in keys),
        )  # fmt: skip
    return [number or 0.0 for number in numbers]
