"""What becomes of scores before and after the estimator, by hand: shaping, a reward model, KL, sequences, groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from strop.algorithms.dynamic_sampling_config import FilterGroupsConfig
from strop.algorithms.group_functions import SampleGroup
from strop.algorithms.reward_kl import less_kl
from strop.algorithms.sequence_credit import (
    episode_representatives,
    spread_over_sequences,
    with_answer_scores,
)
from strop.rewards import Outcome, RewardConfig
from strop.trainer.collectors.filter_rules import EASY, EQUAL, FAILED, HARD, SOLVED, UNSCORED, left_out_for
from strop.workers.reports import EpisodeReport, training_rewards
from strop.workers.reward_shaping import penalized


def test_a_reward_model_adds_on_the_last_token_and_the_penalty_acts_on_trained_ones() -> None:
    scores = torch.tensor([[0.0, 0.0, 1.0], [2.0, 0.0, 0.0]])
    mask = torch.tensor([[True, False, True], [True, False, False]])
    lengths = torch.tensor([3, 1])
    kl = torch.tensor([[0.5, 9.0, 1.0], [2.0, torch.nan, torch.nan]])
    answers = torch.tensor([10.0, -10.0])
    assert torch.equal(with_answer_scores(scores, lengths, None), scores)
    found = less_kl(with_answer_scores(scores, lengths, answers), mask, kl, 0.5)
    assert found.tolist() == [[-0.25, 0.0, 10.5], [-9.0, 0.0, 0.0]]


def test_a_long_response_loses_after_the_weight() -> None:
    # The penalty begins at 8 of 10 tokens and is full, 2, at 10.
    reports = [
        EpisodeReport(
            uid="e0-000000", sample_index=number, data_source="", num_prompt_tokens=1, num_response_tokens=length,
            num_sampled_tokens=length, outcome=Outcome(kind="score", score=2.0),
        )
        for number, length in enumerate((8, 9, 10, 12))
    ]  # fmt: skip
    plain = training_rewards(reports, weight=3.0)
    reward: Any = RewardConfig(overlong_buffer=2, overlong_penalty=2.0)  # type: ignore[call-arg]
    assert list(penalized(reward, reports, plain, 10).values()) == [6.0, 5.0, 4.0, 4.0]
    assert list(penalized(RewardConfig(), reports, plain, 10).values()) == [6.0] * 4


def test_the_last_trained_sequence_speaks_for_its_episode() -> None:
    mask = torch.tensor([[True, True], [False, True], [False, False], [True, False]])
    assert episode_representatives(["a", "b", "c", "d"], mask) is None
    representatives = episode_representatives(["a", "a", "a", "b"], mask)
    assert representatives == ([1, 3], [0, 0, 0, 1])
    # Sequences without a trained token speak only where the episode has none that has one.
    assert episode_representatives(["c", "c", "d", "d"], mask[[2, 2, 0, 2]]) == ([1, 2], [0, 0, 1, 1])
    own = torch.tensor([[0.0, 4.0], [7.0, 0.0]])
    advantages, returns = spread_over_sequences(own, own + 1, mask, *representatives)
    assert advantages.tolist() == [[4.0, 4.0], [0.0, 4.0], [0.0, 0.0], [7.0, 0.0]]
    assert returns[0].tolist() == [5.0, 5.0]
    # Credit per token: the row that speaks keeps what each token has, and the others get what its first one has.
    per_token = torch.tensor([[2.0, 3.0]])
    both, _ = spread_over_sequences(per_token, per_token, mask[[0, 0]], [1], [0, 0])
    assert both.tolist() == [[2.0, 2.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("rewards", "cause"),
    [
        ((1.0,), UNSCORED),
        ((1.0, 1.0), SOLVED),
        ((0.0, 0.0), FAILED),
        ((0.5, 0.5), EQUAL),
        ((0.0, 0.25), HARD),
        ((0.0, 0.5), ""),
        ((0.75, 1.0), EASY),
        ((0.5, 1.0), ""),
        ((0.0, 1.0), ""),
    ],
)
def test_groups_that_cannot_teach(rewards: tuple[float, ...], cause: str) -> None:
    settings = FilterGroupsConfig(enable=True, metric="score", lowest_mean=0.25, highest_mean=0.75)
    count = len(rewards)
    group = SampleGroup(
        uid="e0-000001",
        data_source="x",
        rewards=rewards,
        accuracies=(0.0,) * count,
        parts=({},) * count,
        response_lengths=(1,) * count,
        num_turns=(2,) * count,
        stop_reasons=("stop",) * count,
    )
    assert left_out_for(group, settings) == cause


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ({"exact": 0.0, "format": 1.0}, EQUAL),
        ({"acc": False, "format": 1.0}, FAILED),
        ({"acc": True}, SOLVED),
    ],
)
def test_a_reward_of_one_solves_nothing_by_itself(parts: dict[str, float | bool], cause: str) -> None:
    """A prompt that is called solved is retired: a sum of 1 with no right answer in it must not be."""
    group = SampleGroup(
        uid="e0-000001", data_source="x", rewards=(1.0, 1.0), accuracies=(1.0, 1.0), parts=(parts, parts),
        response_lengths=(1, 1), num_turns=(2, 2), stop_reasons=("stop", "stop"),
    )  # fmt: skip
    assert left_out_for(group, FilterGroupsConfig(enable=True)) == cause
