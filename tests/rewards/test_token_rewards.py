"""Rewards of single tokens, as a manager gives them: they belong to a score, and leave with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards.config import RewardConfig
from strop.rewards.outcome import Outcome
from strop.rewards.required import with_parts
from strop.workers.episode_scores import EpisodeScores
from strop.workers.episodes import Episode, token_scores

PROMPT = Prompt(uid="e0-000001", row=0, token_ids=(1,), messages=(), data_source="", ground_truth=None)
SAMPLE = Trajectory(uid=PROMPT.uid, sample_index=0, prompt_ids=(1,)).with_sampled(
    [3, 4, 5], [-1.0] * 3, [0] * 3
)
MANAGED = Outcome(kind="score", score=3.0, token_rewards=[(0, 1.0), (2, 2.0)])
DOWN = Outcome(kind="infrastructure", error="the judge was not reached", fallback_score=-4.0)


class Scripted:
    """A manager's outcome, and what a comparison makes of it."""

    config = RewardConfig()

    def __init__(self, outcome: Outcome, compared: Outcome | None = None) -> None:
        self._outcome, self._compared = outcome, compared
        self.compares = compared is not None

    async def score(self, *_: Any, in_group: bool = False) -> Outcome:
        return self._outcome

    async def compare(self, _: Prompt, answers: Sequence[tuple[str, Outcome]], __: Any = ()) -> list[Outcome]:
        assert self._compared is not None
        return [self._compared for _ in answers]


def scored(scorers: Scripted, *sequences: Trajectory) -> Episode:
    tokenizer: Any = type("Words", (), {"decode": lambda self, ids, **_: "text"})()
    scores = EpisodeScores(scorers, tokenizer)

    async def play() -> Episode:
        episode = await scores.scored(PROMPT, sequences or (SAMPLE,), in_group=scorers.compares)
        return (await scores.compared(PROMPT, [episode]))[0] if scorers.compares else episode

    return asyncio.run(play())


def rewards_of(episode: Episode) -> list[list[float]]:
    outcome = episode.outcome
    assert outcome is not None
    assert outcome.token_rewards == ()
    reward = outcome.fallback_score if outcome.score is None else outcome.score
    assert reward is not None
    return token_scores(episode.sequences, reward)


def test_token_rewards_stay_on_their_tokens_and_the_rest_is_on_the_last() -> None:
    assert rewards_of(scored(Scripted(MANAGED))) == [[1.0, 0.0, 2.0]]
    assert rewards_of(scored(Scripted(MANAGED, replace(MANAGED, score=3.5)))) == [[1.0, 0.0, 2.5]]


def test_a_failed_comparison_leaves_no_token_rewards() -> None:
    assert rewards_of(scored(Scripted(MANAGED, DOWN))) == [[0.0, 0.0, -4.0]]


@pytest.mark.parametrize("outcome", [MANAGED, Outcome(kind="score", score=3.0)])
def test_rewards_that_an_agent_gave_its_answers_stay(outcome: Outcome) -> None:
    """Whether the manager puts its reward on the last token alone or not."""
    answered = replace(SAMPLE, turn_rewards=((1, 0.5),))
    assert rewards_of(scored(Scripted(outcome), answered)) == [[0.0, 0.5, 2.5]]
    assert rewards_of(scored(Scripted(outcome), answered, SAMPLE))[1] == [0.0, 0.0, 3.0]


def test_a_missing_part_takes_the_token_rewards_along() -> None:
    lacking = with_parts(MANAGED, ["fmt"], RewardConfig())
    assert (lacking.kind, lacking.score, lacking.token_rewards) == ("error", None, ())
    assert with_parts(MANAGED, ["score"], RewardConfig()) == MANAGED


def test_an_outcome_without_a_score_takes_no_token_rewards() -> None:
    with pytest.raises(
        ValueError, match="needs an error sentence, no score and no token_rewards, got Outcome"
    ):
        replace(DOWN, token_rewards=[(0, 1.0)])
