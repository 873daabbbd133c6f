"""Columns of single answers, for estimators that compare the answers of episodes (GiGPO)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from strop.protocol import DataProto
from strop.recipes.anchors import anchor_ids
from strop.trajectory import Trajectory
from strop.workers.episodes import Episode


def own_rewards(sequences: Sequence[Trajectory], reward: float, *, turn_weight: float = 1.0) -> list[float]:
    """What each training sequence of an episode earned by itself; where they stand alone, they add up to its reward.

    What is no answer's own (a penalty on length, a change by algorithm.reward_shaping) is the last one's.

    Args:
        sequences: of one episode, in order.
        reward: of the episode, after weights and penalties.
        turn_weight: of the rewards of single answers, the weight that `reward` has already.
    """
    made = []
    for number, sequence in enumerate(sequences):
        own = sum(
            turn_weight * value
            for place, value in sequence.turn_rewards
            if place < len(sequence.response_ids)  # not one that was cut off
        )
        is_followed = sequence.stands_alone and number < len(sequences) - 1
        made.append(own if is_followed else reward)
        if sequence.stands_alone:
            reward -= own
    return made


def step_columns(
    episodes: Sequence[Episode], rewards: Sequence[float], *, turn_weight: float, similarity: float
) -> DataProto:
    """The columns that STEP_COLUMNS names [B], for the rows of `episode_rows`.

    Args:
        episodes, rewards, turn_weight: as of `episode_rows`; all samples of a prompt are among them.
        similarity: see `strop.recipes.anchors.anchor_ids`.
    """
    sequences = [one for episode in episodes for one in episode.sequences]
    anchors = anchor_ids(
        [one.anchor for one in sequences], [one.uid for one in sequences], similarity=similarity
    )
    turns = [number for episode in episodes for number in range(len(episode.sequences))]
    own = [
        value
        for episode, reward in zip(episodes, rewards, strict=True)
        for value in own_rewards(episode.sequences, reward, turn_weight=turn_weight)
    ]
    return DataProto.from_dict(
        {
            "sample_index": torch.tensor([one.sample_index for one in sequences], dtype=torch.int64),
            "turn_index": torch.tensor(turns, dtype=torch.int64),
            "turn_rewards": torch.tensor(own, dtype=torch.float64),
            "anchor_ids": torch.tensor(anchors, dtype=torch.int64),
        }
    )
