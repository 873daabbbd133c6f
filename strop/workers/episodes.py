"""Playing prompts: every sample through its agent and its scorer, all at the same time.

Concurrency: one asyncio loop. A sample is scored as soon as it ends, while others still generate. Results
come back in the order of the prompts and sample numbers, never in the order of completion. This is the one
place that may catch an agent's exception: the episode is recorded as failed with its reason, and too many
of them end the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from strop.agents.episodes import play_episode
from strop.rewards.outcome import Outcome
from strop.rewards.pool import RewardPool
from strop.rollout.client import GenerateClient
from strop.rollout.types import Sampling
from strop.trajectory import Prompt, Trajectory

logger = logging.getLogger(__name__)

MAX_FAILED_SHARE = 0.2
"""Share of a step's episodes that may fail before scoring; above it the run stops."""


class EpisodesFailed(RuntimeError):
    """Too many episodes failed; the message holds the first failure."""


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

    @property
    def score(self) -> float | None:
        return None if self.outcome is None else self.outcome.score

    @property
    def accuracy(self) -> float | None:
        """The scorer's `acc` where it gave a number, else its score; None when not scored."""
        if self.outcome is None or self.outcome.score is None:
            return None
        given = self.outcome.parts.get("acc", self.outcome.score)
        return self.outcome.score if isinstance(given, str) else float(given)


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
            EpisodesFailed: more than MAX_FAILED_SHARE of the agents failed.
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
        episodes = [task.result() for task in tasks]
        failures = [episode for episode in episodes if episode.trajectory is None]
        if len(failures) > MAX_FAILED_SHARE * len(episodes):
            raise EpisodesFailed(
                f"{len(failures)} of {len(episodes)} episodes failed; the first one, {failures[0].id}: "
                f"{failures[0].failure}"
            )
        return episodes

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
