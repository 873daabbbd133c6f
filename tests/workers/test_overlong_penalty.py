"""The penalty on long responses, and the limit that it refers to."""

from __future__ import annotations

import dataclasses

import pytest

from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards import Outcome, RewardConfig
from strop.workers.episodes import Episode
from strop.workers.reports import EpisodeReport, episode_report
from strop.workers.reward_shaping import penalized


def test_the_penalty_is_full_where_a_response_is_cut() -> None:
    """A limit of 100 tokens and a buffer of 40: nothing up to 60, half at 80, all at 100. An agent with 30 tokens of
    its own behind the prompt of the row has 70 for the response, so that all of this is 30 tokens earlier."""
    config = RewardConfig(overlong_buffer=40, overlong_penalty=2.0)
    lengths = {0: [60, 80, 100], 30: [30, 50, 70]}
    reports = [
        EpisodeReport(
            uid="e0-000001", sample_index=10 * added + length, data_source="x", num_prompt_tokens=5 + added,
            num_added_tokens=added, num_response_tokens=length,
        )
        for added, of_added in lengths.items()
        for length in of_added
    ]  # fmt: skip
    rewards = penalized(config, reports, {report.id: 1.0 for report in reports}, 100)
    assert [rewards[report.id] for report in reports] == pytest.approx([1.0, 0.0, -1.0] * 2)


def test_tokens_behind_the_prompt_of_the_row_are_counted() -> None:
    prompt = Prompt(uid="u", row=0, token_ids=(5, 6), messages=(), data_source="x", ground_truth="")
    bare = Trajectory(uid="u", sample_index=0, prompt_ids=(5, 6, 7, 8, 9))
    played = bare.with_sampled((1, 2), (0.0, 0.0), (0, 0)).finish("stop")
    episode = Episode(
        prompt=prompt, sample_index=0, trajectory=played, outcome=Outcome(kind="score", score=1.0)
    )
    assert episode_report(episode).num_added_tokens == 3
    shorter = dataclasses.replace(prompt, token_ids=(5, 6, 7, 8, 9, 10))
    assert episode_report(dataclasses.replace(episode, prompt=shorter)).num_added_tokens == 0
