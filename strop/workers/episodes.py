"""Playing prompts: every sample through its agent and its scorer, all at the same time.

Concurrency: one asyncio loop. A sample is scored as soon as it ends, while others still generate. Results
come back in the order of the prompts and sample numbers, never in the order of completion. This is the one
place that may catch an agent's exception: the episode is recorded as failed with its reason, and the trainer
ends the run when there are too many of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from strop.agents.episodes import play_episode
from strop.protocol import DataProto, columns
from strop.rewards.outcome import Outcome
from strop.rewards.pool import RewardPool
from strop.rollout.client import GenerateClient
from strop.rollout.types import Sampling
from strop.trajectory import Prompt, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One sample with everything that became of it."""

    prompt: Prompt
    sample_index: int
    trajectory: Trajectory | None
    """None when the agent failed."""
    text: str = ""
    """The response as text, without special tokens: what the scorer read."""
    outcome: Outcome | None = None
    """None when there was nothing to score."""
    failure: str = ""
    """Why there is no trajectory."""

    @property
    def id(self) -> str:
        return f"{self.prompt.uid}/{self.sample_index}"


class Rollouts:
    """Plays prompts with one engine client and one pool of scorers."""

    def __init__(self, client: GenerateClient, pool: RewardPool, tokenizer: Any, *, seed: int) -> None:
        self._client = client
        self._pool = pool
        self._tokenizer = tokenizer
        self._seed = seed

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
            trajectory = await play_episode(prompt, sample_index, self._client, sampling, seed=self._seed)
        except Exception as error:
            logger.exception("episode %s/%d failed", prompt.uid, sample_index)
            failure = f"{type(error).__name__}: {error}"
            return Episode(prompt=prompt, sample_index=sample_index, trajectory=None, failure=failure)
        text = self._tokenizer.decode(trajectory.response_ids, skip_special_tokens=True)
        outcome = None
        if trajectory.stop_reason != "aborted":
            outcome = await self._pool.score(prompt, trajectory, text)
        return Episode(
            prompt=prompt, sample_index=sample_index, trajectory=trajectory, text=text, outcome=outcome
        )


def episode_rows(episodes: Sequence[Episode], rewards: Sequence[float], *, temperature: float) -> DataProto:
    """One row per episode, in order; all have a trajectory with at least one response token.

    Columns: prompts [B, P~], responses, response_mask, rollout_log_probs and token_level_scores [B, R~] (the
    reward on the last response token); uid and id beside them. Without episodes, the same columns with no row.
    """
    trajectories = [episode.trajectory for episode in episodes if episode.trajectory is not None]
    assert len(trajectories) == len(episodes) == len(rewards), "failed episodes were left out before"
    prompt_lengths = torch.tensor([len(t.prompt_ids) for t in trajectories], dtype=torch.int64)
    lengths = torch.tensor([len(t.response_ids) for t in trajectories], dtype=torch.int64)
    scores = torch.zeros(int(lengths.sum()))
    scores[lengths.cumsum(0) - 1] = torch.tensor(list(rewards))

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
            "id": np.array([t.id for t in trajectories], dtype=object),
        },
    )
    rows.meta_info["temperature"] = temperature
    return rows
