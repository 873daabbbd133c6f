"""Episodes: one sample with its trajectory and outcome, and the rows that are trained on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from strop.protocol import DataProto, columns
from strop.protocol.routed_experts import TOKEN_DTYPE
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards.outcome import Outcome

ROUNDING = 1e-12
"""Share of the largest of some rewards that is lost when they are added up in another order."""


class EpisodeFailed(RuntimeError):
    """An episode failed in another process; the text says with which exception."""


class EpisodeTimes(NamedTuple):
    """Ends of an episode's parts, in seconds from its begin; 0 where nobody timed it."""

    played_s: float = 0.0
    """When the agent had ended, with the last token."""
    scored_s: float = 0.0
    """When it had been scored."""


UNTIMED = EpisodeTimes()


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One sample with its trajectory, text and outcome."""

    prompt: Prompt
    sample_index: int
    trajectory: Trajectory | None
    """None when the agent failed; of several training sequences the last one."""
    earlier: tuple[Trajectory, ...] = ()
    """Training sequences before it, of an episode whose history was rewritten on the way."""
    text: str = ""
    """The response as text, without special tokens: what the scorer read."""
    outcome: Outcome | None = None
    """None when there was nothing to score."""
    failure: str = ""
    """Reason for a missing trajectory."""
    times: EpisodeTimes = UNTIMED

    @property
    def id(self) -> str:
        return f"{self.prompt.uid}/{self.sample_index}"

    @property
    def first(self) -> Trajectory | None:
        """The sequence that began it; None when the agent failed."""
        return self.earlier[0] if self.earlier else self.trajectory

    @property
    def prompt_messages(self) -> Sequence[Mapping[str, Any]]:
        """The prompt that the model was shown: the row's, or with what an environment or an agent made of it."""
        return (self.first.prompt_messages if self.first is not None else ()) or self.prompt.messages

    @property
    def sequences(self) -> tuple[Trajectory, ...]:
        """Its training sequences that have a sampled token, in order."""
        every = (*self.earlier, *(() if self.trajectory is None else (self.trajectory,)))
        return tuple(sequence for sequence in every if any(sequence.sampled))


def row_id(episode_id: str, number: int, count: int) -> str:
    """Name of a training sequence: its sample's for the last (or only) one, else with its number behind."""
    return episode_id if number == count - 1 else f"{episode_id}.{number}"


def token_scores(
    sequences: Sequence[Trajectory], reward: float, *, turn_weight: float = 1.0
) -> list[list[float]]:
    """Token-level scores of each sequence; a sequence's scores add up to its reward.

    Args:
        sequences: of one episode, in order.
        reward: of the episode, after weights and penalties.
        turn_weight: of the rewards of single answers, the weight that `reward` has already.
    """
    all_scores: list[list[float]] = []
    worth = rewards_onward(sequences, reward, turn_weight=turn_weight)
    for sequence, sequence_reward in zip(sequences, worth, strict=True):
        scores = [0.0] * len(sequence.response_ids)
        for index, value in sequence.turn_rewards:
            if index < len(scores):  # not one that was cut off
                scores[index] += turn_weight * value
        scores[-1] += sequence_reward - sum(scores)
        all_scores.append(scores)
    return all_scores


def turn_score(sequence: Trajectory, *, turn_weight: float) -> float:
    """Weighted sum of the rewards of a sequence's answers, without those that were cut off."""
    kept = [value for index, value in sequence.turn_rewards if index < len(sequence.response_ids)]
    return math.fsum(turn_weight * value for value in kept)


def rewards_onward(
    sequences: Sequence[Trajectory], reward: float, *, turn_weight: float = 1.0
) -> list[float]:
    """Reward that each training sequence of an episode carries: the episode's; of one that stands alone, what the
    episode had from it on. What is left behind the last answer is exactly nothing where the answers have it all.

    Args:
        sequences, reward, turn_weight: as of `token_scores`.
    """
    scores = [
        turn_score(sequence, turn_weight=turn_weight) if sequence.stands_alone else 0.0
        for sequence in sequences
    ]
    others = reward - math.fsum(scores)  # penalties, and what a scorer gave
    if abs(others) <= ROUNDING * max(abs(reward), *map(abs, scores), 0.0):
        others = 0.0
    return [math.fsum([others, *scores[number:]]) for number in range(len(scores))]


def episode_rows(
    episodes: Sequence[Episode], rewards: Sequence[float], *, temperature: float, turn_weight: float = 1.0
) -> DataProto:
    """One row per training sequence, in the order of the episodes; each episode has at least one.

    Every sequence carries the reward of its episode; one that stands alone what the episode had from it on, and an
    episode_id of its own.

    Columns: prompts [B, P~], responses, response_mask, rollout_log_probs and token_level_scores [B, R~] (rewards of
    single answers on the last token of each, the rest on the last response token); uid, id and episode_id beside
    them; routed_experts [B, T~, K] where a sequence has them, -1 where nothing is known of a token. Without episodes,
    the same columns with no row.
    """
    trajectories = [sequence for episode in episodes for sequence in episode.sequences]
    counts = [len(episode.sequences) for episode in episodes]
    assert len(counts) == len(rewards), "one reward per episode"
    assert all(counts), "episodes without a sampled token were left out before"
    ids = [
        row_id(episode.id, number, count)
        for episode, count in zip(episodes, counts, strict=True)
        for number in range(count)
    ]
    prompt_lengths = torch.tensor([len(t.prompt_ids) for t in trajectories], dtype=torch.int64)
    lengths = torch.tensor([len(t.response_ids) for t in trajectories], dtype=torch.int64)
    scores = torch.tensor(
        [
            score
            for episode, reward in zip(episodes, rewards, strict=True)
            for row in token_scores(episode.sequences, reward, turn_weight=turn_weight)
            for score in row
        ],
        dtype=torch.float32,
    )

    def flat(values: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([value for row in values for value in row], dtype=dtype)

    responses = columns.from_flat(flat([t.response_ids for t in trajectories], torch.int64), lengths)
    rows = DataProto.from_dict(
        {
            "prompts": columns.from_flat(
                flat([t.prompt_ids for t in trajectories], torch.int64), prompt_lengths
            ),
            "responses": responses,
            "response_mask": columns.jagged_like(
                responses, flat([t.sampled for t in trajectories], torch.bool)
            ),
            "rollout_log_probs": columns.jagged_like(
                responses, flat([t.log_probs for t in trajectories], torch.float32)
            ),
            "token_level_scores": columns.jagged_like(responses, scores),
            **_routed_column(trajectories),
        },
        non_tensors={
            "uid": np.array([t.uid for t in trajectories], dtype=object),
            "id": np.array(ids, dtype=object),
            "episode_id": np.array(
                [name if t.stands_alone else t.id for t, name in zip(trajectories, ids, strict=True)],
                dtype=object,
            ),
        },
    )
    rows.meta_info["temperature"] = temperature
    return rows


def _routed_column(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """Experts of the tokens that a model reads of each sequence, all but its last; nothing where none has any."""
    known = [sequence.routed_experts for sequence in trajectories if sequence.routed_experts is not None]
    if not known:
        return {}
    width = known[0].num_layers * known[0].num_chosen
    rows = []
    for sequence in trajectories:
        num_read = len(sequence.prompt_ids) + len(sequence.response_ids) - 1
        row = np.full((num_read, width), -1, dtype=np.int16)
        if sequence.routed_experts is not None:
            tokens = sequence.routed_experts.first(num_read).tokens
            row[: len(tokens)] = np.frombuffer(b"".join(tokens), dtype=TOKEN_DTYPE).reshape(-1, width)
        rows.append(torch.from_numpy(row))
    return {"routed_experts": columns.jagged(rows)}
