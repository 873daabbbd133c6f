"""What is known of single answers of an episode, and what GiGPO makes of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.algorithms.config import AlgorithmConfig
from strop.protocol import DataProto, columns
from strop.protocol.trajectory import Prompt, Trajectory
from strop.workers.episodes import Episode, episode_rows, rewards_onward, token_scores
from strop.workers.estimates import compute_advantages
from strop.workers.estimator_columns import own_rewards, step_columns
from strop.workers.summary import summarize

PLAIN = AlgorithmConfig(adv_estimator="gigpo", norm_adv_by_std=False, gamma=0.5)


def answers(number: int, *turns: tuple[str, float], alone: bool = True) -> tuple[Trajectory, ...]:
    """An episode, of each answer the state and the reward; an answer has two tokens."""
    empty = Trajectory(uid="p", sample_index=number, prompt_ids=(1,))
    said = empty.with_sampled((2, 3), (-1.0, -1.0), (0, 0)).finish("stop")
    return tuple(
        dataclasses.replace(said, anchor=state, turn_rewards=((1, reward),), stands_alone=alone)
        for state, reward in turns
    )


def rows(episodes: Sequence[Sequence[Trajectory]], rewards: Sequence[float], **changed: float) -> DataProto:
    prompt = Prompt(uid="p", row=0, token_ids=(1,), messages=(), data_source="", ground_truth="")
    made = [
        Episode(prompt=prompt, sample_index=n, trajectory=one[-1], earlier=tuple(one[:-1]))
        for n, one in enumerate(episodes)
    ]
    options = {"turn_weight": 1.0, "similarity": 1.0, **changed}
    plain = episode_rows(made, rewards, temperature=1.0, turn_weight=options["turn_weight"])
    return plain.union(step_columns(made, rewards, **options))


def first_tokens(made: DataProto) -> list[float]:
    return [row[0].item() for row in columns.rows(made.tensors()["advantages"])]


def test_answers_earn_their_own_and_the_last_one_what_is_no_answers() -> None:
    turns = answers(0, ("a", 0.25), ("b", 0.25), ("c", 1.0))
    # A weight of 2 and a penalty of 0.1: 2 * 1.5 - 0.1.
    assert own_rewards(turns, 2.9, turn_weight=2.0) == pytest.approx([0.5, 0.5, 1.9])
    whole = answers(0, ("", 0.25), ("", 1.0), alone=False)
    assert own_rewards(whole, 1.5) == [1.5, 1.5], "every sequence of an episode is worth what that is"
    assert own_rewards([], 1.0) == []
    for place in (len(turns[0].response_ids), 7):  # behind its last token
        cut = dataclasses.replace(turns[0], turn_rewards=((place, 0.25),))
        assert own_rewards([cut, turns[2]], 1.0) == [0.0, 1.0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.7]), min_size=1, max_size=6), st.sampled_from([1.0, 0.3])
)
def test_nothing_is_left_where_the_answers_have_it_all(values: list[float], weight: float) -> None:
    turns = answers(0, *(("", value) for value in values))
    onward = rewards_onward(turns, weight * sum(values), turn_weight=weight)
    assert onward == [math.fsum(weight * value for value in values[number:]) for number in range(len(values))]
    scores = token_scores(turns, weight * sum(values), turn_weight=weight)
    assert min(min(row) for row in scores) >= 0
    assert rewards_onward(turns, 1e-9 + weight * sum(values), turn_weight=weight)[-1] > onward[-1]


def test_gigpo_of_two_episodes_that_meet_in_a_state() -> None:
    batch = rows(
        [answers(0, ("a", 0.0), ("b", 1.0)), answers(1, ("a", 0.0), ("c", 0.0), ("b", 3.0))], [1.0, 3.0]
    )
    tensors = batch.tensors()
    assert tensors["sample_index"].tolist() == [0, 0, 1, 1, 1]
    assert tensors["turn_index"].tolist() == [0, 1, 0, 1, 2]
    assert tensors["turn_rewards"].tolist() == [0.0, 1.0, 0.0, 0.0, 3.0]
    # Episodes: 1 and 3 around 2. To go, halved per answer: 0.5, 1 and 0.75, 1.5, 3. State a: 0.5 and 0.75; b: 1 and 3;
    # c is alone.
    made = compute_advantages(batch, PLAIN)
    assert made.tensors()["advantages"].dtype == torch.float32
    assert first_tokens(made) == [-1.125, -2.0, 1.125, 1.0, 2.0]
    assert all(len(set(row.tolist())) == 1 for row in columns.rows(made.tensors()["advantages"]))


def test_rows_in_another_order_have_the_same_advantages() -> None:
    batch = rows(
        [answers(0, ("a", 0.0), ("b", 1.0)), answers(1, ("a", 0.0), ("c", 0.0), ("b", 3.0))], [1.0, 3.0]
    )
    order = [3, 0, 4, 2, 1]
    made = compute_advantages(batch.select_idxs(np.array(order)), PLAIN)
    assert first_tokens(made) == [[-1.125, -2.0, 1.125, 1.0, 2.0][row] for row in order]


def test_what_a_reward_model_or_a_penalty_adds_to_a_row_is_that_answers_own() -> None:
    batch = rows([answers(0, ("a", 0.0), ("b", 1.0)), answers(1, ("a", 0.0), ("b", 3.0))], [1.0, 3.0])
    batch = batch.union(DataProto.from_dict({"rm_scores": torch.tensor([4.0, 0.0, 0.0, 0.0])}))
    # Earned: 4, 1 and 0, 3; episodes are worth 5 and 3. To go: 4.5, 1 and 1.5, 3.
    made = compute_advantages(batch, PLAIN)
    assert first_tokens(made) == [1 + 1.5, 1 - 1.0, -1 - 1.5, -1 + 1.0]


def test_states_that_are_alike_are_compared_where_that_is_asked_for() -> None:
    episodes = [answers(0, ("room 12, dark", 1.0)), answers(1, ("room 12, dusk", 0.0))]
    assert rows(episodes, [1.0, 0.0]).tensors()["anchor_ids"].tolist() == [0, 1]
    assert rows(episodes, [1.0, 0.0], similarity=0.75).tensors()["anchor_ids"].tolist() == [0, 0]


@pytest.mark.parametrize("alone", [False, True])
def test_a_sample_counts_once_in_scores_and_rewards_however_many_rows_it_has(alone: bool) -> None:
    made = rows([answers(0, ("", 1.0), ("", 1.0), ("", 2.0), alone=alone), answers(1, ("", 1.0))], [4.0, 1.0])
    log_probs = made.tensors()["rollout_log_probs"]
    mask = made.tensors()["response_mask"]
    made = made.union(DataProto.from_dict({"old_log_probs": log_probs, "rm_scores": torch.full((4,), 0.5)}))
    made = made.union(compute_advantages(made, AlgorithmConfig(adv_estimator="grpo")))
    metrics = summarize(made, AlgorithmConfig(adv_estimator="grpo"), [0, 3]).metrics
    assert len(columns.rows(mask)) == 4
    assert [metrics[f"critic/score/{word}"] for word in ("mean", "max", "min")] == [2.5, 4.0, 1.0]
    # A reward model scores every answer that stands alone, and else the last sequence of a sample.
    of_first = 4.0 + 3 * 0.5 if alone else 4.5
    assert metrics["critic/rewards/mean"] == (of_first + 1.5) / 2
    one = summarize(made[:3], AlgorithmConfig(adv_estimator="grpo"), [0]).metrics
    assert one["rollout/groups_single"] == (not alone)
