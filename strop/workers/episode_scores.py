"""Scores of episodes: of a sample once it was played, and of the samples of a prompt together.

Concurrency: one asyncio loop. Samples are scored at the same time, each as it ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from strop.agents.spans import SPANS, add_span
from strop.data.visit_ids import is_visit
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards.config import RewardConfig
from strop.rewards.outcome import Outcome
from strop.rewards.passing import with_binary_acc
from strop.rewards.required import with_parts
from strop.utils.chat_template.answers import answer_text
from strop.utils.sanitize import encodable, storable_text, usable
from strop.utils.sanitize.values import MAX_NUMBER
from strop.workers.episodes import Episode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class Scorers(Protocol):
    """Scores samples, as a RewardPool does."""

    @property
    def config(self) -> RewardConfig:
        """Settings of the reward."""
        ...

    @property
    def compares(self) -> bool:
        """As of RewardPool."""
        ...

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, solution_str: str, *, in_group: bool = False
    ) -> Outcome:
        """Score one sample, as RewardPool.score."""
        ...

    async def compare(
        self,
        prompt: Prompt,
        answers: Sequence[tuple[str, Outcome]],
        trajectories: Sequence[Trajectory] = (),
    ) -> list[Outcome]:
        """Score the samples of a prompt together, as RewardPool.compare."""
        ...


class EpisodeScores:
    """Scores of the episodes of one runner."""

    def __init__(
        self,
        scorers: Scorers | None,
        tokenizer: PreTrainedTokenizerBase,
        *,
        reward_keys: Sequence[str] = (),
        scores_text_alone: bool = False,
    ) -> None:
        """Args:
        scorers: they stay the caller's to close; None: nothing is scored.
        tokenizer: of the model.
        reward_keys: parts of the reward without which a sample of a training visit could not be scored.
        scores_text_alone: a reward model scores as well, which is shown no images: samples with any could not be
            scored.
        """
        self._scorers, self._tokenizer = scorers, tokenizer
        self._reward_keys, self._scores_text_alone = tuple(reward_keys), scores_text_alone
        self._has_warned = False

    @property
    def compares(self) -> bool:
        """Scorers see the samples of a prompt together, once all have ended."""
        return self._scorers is not None and self._scorers.compares

    async def scored(self, prompt: Prompt, sequences: tuple[Trajectory, ...], *, in_group: bool) -> Episode:
        """A sample with its text and its outcome. In a group, scorers that compare answers are called later.

        Raises:
            RewardError: the scorers cannot go on.
        """
        trajectory = sequences[-1]
        text = encodable(
            "".join(answer_text(self._tokenizer, sequence.response_ids) for sequence in sequences)
        )
        outcome = None
        if self._scores_text_alone and any(sequence.media for sequence in sequences):
            outcome = self._media_error()
        elif trajectory.reward_score is not None:
            outcome = self.with_parts(prompt, _agent_outcome(trajectory))
        elif trajectory.stop_reason != "aborted" and self._scorers is not None:
            start = time.perf_counter()
            self._name_unread_rewards(trajectory)
            outcome = await self._score(self._scorers, prompt, trajectory, text, in_group=in_group)
            seconds = time.perf_counter() - start
            is_whole = not (in_group and self._scorers.compares)
            score = outcome.score if is_whole else None
            add_span(SPANS.get(), "reward", "", seconds, outcome=outcome.kind, score=score)
        episode = Episode(
            prompt=prompt,
            sample_index=trajectory.sample_index,
            trajectory=trajectory,
            earlier=sequences[:-1],
            text=text,
            outcome=outcome,
        )
        return episode if in_group and self.compares else _with_token_rewards(episode)

    def _name_unread_rewards(self, trajectory: Trajectory) -> None:
        """Warn once of rewards of tools or users that nobody reads: built-in scorers look at the response alone."""
        config = None if self._scorers is None else self._scorers.config
        if self._has_warned or config is None or config.services:
            return
        if config.path or any(function.path for function in config.functions):
            return
        for name in ("tool_rewards", "rollout_reward_scores", "turn_scores"):
            rewards = trajectory.extra.get(name)
            values = rewards.values() if isinstance(rewards, Mapping) else rewards
            if isinstance(values, Iterable) and any(usable(value) for value in values):
                self._has_warned = True
                logger.warning(
                    "an episode has %s, which the built-in scorer of its data_source does not read: they are not "
                    "trained on; add them up in a function of your own (reward.path), whose extra_info has them", name
                )  # fmt: skip
                return

    def _media_error(self) -> Outcome:
        """Outcome of a sample with images of a tool, where a scorer is not shown them."""
        reward = None if self._scorers is None else self._scorers.config
        is_fixed = reward is not None and reward.on_failure.error == "fixed"
        return Outcome(
            kind="error",
            error="a tool gave images, which the reward model would not see: remove reward_model.path, or have tools "
            "give text",
            remedy="",
            fallback_score=reward.failed_score if reward is not None and is_fixed else None,
        )

    async def _score(
        self, scorers: Scorers, prompt: Prompt, trajectory: Trajectory, text: str, *, in_group: bool
    ) -> Outcome:
        """Score one trajectory; again where a part that is needed is missing and reward.on_failure.error is retry."""
        config = scorers.config
        if in_group and scorers.compares:  # some parts come later
            return await scorers.score(prompt, trajectory, text, in_group=True)
        outcome = await scorers.score(prompt, trajectory, text)
        if config.compares:
            return outcome
        for _ in range(config.retries if config.on_failure.error == "retry" else 0):
            if outcome.score is None or self.with_parts(prompt, outcome).score is not None:
                break
            outcome = await scorers.score(prompt, trajectory, text)
        return self.with_parts(prompt, outcome)

    def with_parts(self, prompt: Prompt, outcome: Outcome) -> Outcome:
        """As with_parts, of samples that are trained on."""
        if self._scorers is None or not self._reward_keys or not is_visit(prompt.uid):
            return outcome
        return with_parts(outcome, self._reward_keys, self._scorers.config)

    async def compared(self, prompt: Prompt, episodes: Sequence[Episode]) -> tuple[Episode, ...]:
        """The episodes of a prompt with the outcomes of scorers that compare its answers."""
        assert self._scorers is not None, "scorers compare"
        outcomes = [(episode.text, episode.outcome) for episode in episodes if episode.outcome is not None]
        trajectories = [
            episode.trajectory
            for episode in episodes
            if episode.outcome is not None and episode.trajectory is not None
        ]
        found = await self._scorers.compare(prompt, outcomes, trajectories)
        with_parts = iter([self.with_parts(prompt, outcome) for outcome in found])
        return tuple(
            episode
            if episode.outcome is None
            else _with_token_rewards(replace(episode, outcome=next(with_parts)))
            for episode in episodes
        )


def _with_token_rewards(episode: Episode) -> Episode:
    """The episode with the token rewards of its final outcome in its trajectory, unless its agent has given answers
    rewards of their own, which stay. An episode without a score has no token rewards."""
    trajectory, outcome = episode.trajectory, episode.outcome
    if trajectory is None or outcome is None or not outcome.token_rewards:
        return episode
    if not any(sequence.turn_rewards for sequence in episode.sequences):
        places = len(trajectory.response_ids)
        rewards = tuple(pair for pair in outcome.token_rewards if pair[0] < places)
        trajectory = replace(trajectory, turn_rewards=rewards)
    return replace(episode, trajectory=trajectory, outcome=replace(outcome, token_rewards=()))


def _agent_outcome(trajectory: Trajectory) -> Outcome:
    """The outcome of an episode whose agent scored it itself."""
    score, parts = usable(trajectory.reward_score), trajectory.extra.get("reward_parts", {})
    if score is None or not isinstance(parts, Mapping):
        reported = (
            f"the score {storable_text(trajectory.reward_score):.80} and parts of type {type(parts).__name__}"
        )
        sentence = (
            f"the agent gave {reported}; a score is a number up to {MAX_NUMBER:g}, parts are a dictionary"
        )
        return Outcome(kind="error", error=sentence, remedy="repair the agent's score")
    return Outcome(kind="score", score=score, parts=with_binary_acc(score, parts))
