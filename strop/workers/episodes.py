"""Playing prompts: every sample through its agent and its scorer, all at the same time.

Concurrency: one asyncio loop. A sample is scored as soon as it ends, while others still generate. Results
come back in the order of the prompts and sample numbers, never in the order of completion. This is the one
place that may catch an agent's exception: the episode is recorded as failed with its reason, and the trainer
ends the run when there are too many of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from strop.agents.episodes import default_setup, play_episode
from strop.agents.setup import AgentSetup
from strop.border import described, encodable, storable_text, usable
from strop.border.values import MAX_NUMBER
from strop.protocol import DataProto, columns
from strop.rewards.outcome import Outcome
from strop.rewards.pool import RewardPool
from strop.rollout.client import GenerateClient
from strop.rollout.types import Sampling, TokenOutput
from strop.trajectory import Media, MediaTokens, Prompt, Trajectory, media_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One sample with everything that became of it."""

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
    """Why there is no trajectory."""

    @property
    def id(self) -> str:
        return f"{self.prompt.uid}/{self.sample_index}"

    @property
    def sequences(self) -> tuple[Trajectory, ...]:
        """Its training sequences that have a sampled token, in order."""
        played = (*self.earlier, *(() if self.trajectory is None else (self.trajectory,)))
        return tuple(one for one in played if any(one.sampled))


class MediaClient:
    """A client for one prompt with media, which agents need not know of: they see token ids.

    Token ids that carry media already, those of the prompt among them, are handed on.
    """

    def __init__(self, client: GenerateClient, media: tuple[Media, ...]) -> None:
        self._client, self._media = client, media

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> TokenOutput:
        """Continue `prompt_ids`, which begin with the prompt's tokens."""
        if not media_of(prompt_ids):
            prompt_ids = MediaTokens(prompt_ids, self._media)
        return await self._client.generate(request_id, prompt_ids, sampling)


class Rollouts:
    """Plays prompts with one engine client and one pool of scorers."""

    def __init__(
        self,
        client: GenerateClient,
        pool: RewardPool,
        tokenizer: Any,
        *,
        seed: int,
        setup: AgentSetup | None = None,
    ) -> None:
        """Args:
        client, pool: the engine and the scorers.
        tokenizer: of the model.
        seed: of the run.
        setup: agents and tools; None for single turns.
        """
        self._client = client
        self._pool = pool
        self._tokenizer = tokenizer
        self._seed = seed
        self._setup = setup or default_setup(tokenizer)

    async def play(
        self,
        prompts: Sequence[Prompt],
        *,
        samples_per_prompt: int,
        sampling: Sampling,
        on_done: Callable[[], None] = lambda: None,
    ) -> list[Episode]:
        """All samples of all prompts, in order; `on_done` is called as each one ends.

        Raises:
            RewardError: the scorers cannot go on.
        """

        async def one(prompt: Prompt, sample_index: int) -> Episode:
            episode = await self._episode(prompt, sample_index, sampling)
            on_done()
            return episode

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(one(prompt, index))
                    for prompt in prompts
                    for index in range(samples_per_prompt)
                ]
        except ExceptionGroup as errors:  # the first error ended the other tasks
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _episode(self, prompt: Prompt, sample_index: int, sampling: Sampling) -> Episode:
        try:
            client = MediaClient(self._client, prompt.media) if prompt.media else self._client
            sequences = await play_episode(
                prompt, sample_index, client, sampling, seed=self._seed, setup=self._setup
            )
        except Exception as error:
            logger.exception("episode %s/%d failed", prompt.uid, sample_index)
            failure = described(error)
            return Episode(prompt=prompt, sample_index=sample_index, trajectory=None, failure=failure)
        if not sequences:
            nothing = Trajectory(uid=prompt.uid, sample_index=sample_index, prompt_ids=prompt.token_ids)
            finished = nothing.finish("the agent gave no sequence")
            return Episode(prompt=prompt, sample_index=sample_index, trajectory=finished)
        trajectory, earlier = sequences[-1], sequences[:-1]
        text = encodable(
            "".join(self._tokenizer.decode(one.response_ids, skip_special_tokens=True) for one in sequences)
        )
        outcome = None
        if trajectory.reward_score is not None:
            outcome = _given(trajectory)
        elif trajectory.stop_reason != "aborted":
            outcome = await self._pool.score(prompt, trajectory, text)
        return Episode(
            prompt=prompt,
            sample_index=sample_index,
            trajectory=trajectory,
            earlier=earlier,
            text=text,
            outcome=outcome,
        )


def _given(trajectory: Trajectory) -> Outcome:
    """The outcome of an episode whose agent scored it itself."""
    score, parts = usable(trajectory.reward_score), trajectory.extra.get("reward_parts", {})
    if score is None or not isinstance(parts, Mapping):
        found = (
            f"the score {storable_text(trajectory.reward_score):.80} and parts of type {type(parts).__name__}"
        )
        sentence = f"the agent gave {found}; a score is a number up to {MAX_NUMBER:g}, parts are a dictionary"
        return Outcome(kind="error", error=sentence)
    return Outcome(kind="score", score=score, parts={"acc": score, **parts})


def media_column(episodes: Sequence[Episode]) -> DataProto:
    """Column `media` of each row's prompt and response: what roles with a vision-language model need as well."""
    media = [sequence.media for episode in episodes for sequence in episode.sequences]
    column = np.empty(len(media), dtype=object)
    for index, one in enumerate(media):  # one by one: numpy would look into tuples of equal length
        column[index] = one
    return DataProto.from_dict({}, non_tensors={"media": column})


def row_id(episode_id: str, number: int, count: int) -> str:
    """Name of a training sequence: its sample's for the last (or only) one, else with its number behind."""
    return episode_id if number == count - 1 else f"{episode_id}.{number}"


def token_scores(
    sequences: Sequence[Trajectory], reward: float, *, turn_weight: float = 1.0
) -> list[list[float]]:
    """Per sequence and response token, what it is trained with; each sequence's scores add up to what it is worth.

    Args:
        sequences: of one episode, in order.
        reward: of the episode, after weights and penalties.
        turn_weight: of the rewards of single answers, the weight that `reward` has already.
    """
    made: list[list[float]] = []
    for sequence in sequences:
        scores = [0.0] * len(sequence.response_ids)
        for place, value in sequence.turn_rewards:
            if place < len(scores):  # not one that was cut off
                scores[place] += turn_weight * value
        own = sum(scores)
        scores[-1] += reward - own
        made.append(scores)
        if sequence.stands_alone:
            reward -= own
    return made


def episode_rows(
    episodes: Sequence[Episode], rewards: Sequence[float], *, temperature: float, turn_weight: float = 1.0
) -> DataProto:
    """One row per training sequence, in the order of the episodes; each episode has at least one.

    Every sequence carries the reward of its episode; one that stands alone what the episode had from it on, and an
    episode_id of its own.

    Columns: prompts [B, P~], responses, response_mask, rollout_log_probs and token_level_scores [B, R~] (rewards of
    single answers on the last token of each, the rest on the last response token); uid, id and episode_id beside
    them. Without episodes, the same columns with no row.
    """
    trajectories = [one for episode in episodes for one in episode.sequences]
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
