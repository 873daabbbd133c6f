"""From episodes to optimizer batches, on numbers small enough to see."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from strop.algorithms.config import AlgorithmConfig
from strop.protocol import DataProto, columns
from strop.rewards import Outcome
from strop.trainer.experience import add_advantages, add_old_log_probs, make_batch, optimizer_batches
from strop.trainer.records import advantages_by_id
from strop.trainer.rollouts import Episode
from strop.trajectory import Prompt, Trajectory


def episode(uid: str, index: int, *, sampled: Sequence[int], given: Sequence[int] = ()) -> Episode:
    """Sampled tokens with log-probs -0.1, -0.2, ..., then given ones."""
    trajectory = Trajectory(uid=uid, sample_index=index, prompt_ids=(3, 4))
    log_probs = [-(i + 1) / 10 for i in range(len(sampled))]
    trajectory = trajectory.with_sampled(sampled, log_probs, [0] * len(sampled))
    if given:
        trajectory = trajectory.with_given(given)
    prompt = Prompt(uid=uid, row=0, token_ids=(3, 4), messages=(), data_source="", ground_truth="")
    return Episode(
        prompt=prompt,
        sample_index=index,
        trajectory=trajectory.finish("stop"),
        outcome=Outcome(kind="score", score=0.0),
    )


EPISODES = [
    episode("a", 0, sampled=(5, 6)),
    episode("a", 1, sampled=(7,), given=(8, 9)),
    episode("b", 0, sampled=(5, 5, 5)),
]


def lists(batch: DataProto, name: str) -> list[list[float]]:
    return [row.tolist() for row in columns.rows(batch.tensors()[name])]


def batch_of(*rewards: float) -> DataProto:
    return make_batch(EPISODES, rewards, temperature=0.7)


def test_a_batch_holds_the_tokens_as_they_were_sampled() -> None:
    batch = batch_of(1.0, 0.0, 0.5)
    assert lists(batch, "prompts") == [[3, 4]] * 3
    assert lists(batch, "responses") == [[5, 6], [7, 8, 9], [5, 5, 5]]
    assert lists(batch, "response_mask") == [[True, True], [True, False, False], [True] * 3]
    recorded = [[-0.1, -0.2], [-0.1, 0.0, 0.0], [-0.1, -0.2, -0.3]]
    assert lists(batch, "rollout_log_probs") == [pytest.approx(row) for row in recorded]
    assert batch.non_tensor_batch["uid"].tolist() == ["a", "a", "b"]
    assert batch.non_tensor_batch["id"].tolist() == ["a/0", "a/1", "b/0"]
    assert batch.meta_info["temperature"] == 0.7


def test_the_reward_stands_on_the_last_response_token() -> None:
    batch = batch_of(1.0, 0.25, 0.5)
    for name in ("token_level_scores", "token_level_rewards"):
        assert lists(batch, name) == [[0.0, 1.0], [0.0, 0.0, 0.25], [0.0, 0.0, 0.5]]


def test_advantages_compare_the_samples_of_a_prompt_on_sampled_tokens_only() -> None:
    # Rewards 1 and 0: mean 1/2, sample std 1/sqrt(2), so A = +-1/sqrt(2). A group of one has A = 0.
    a = 0.5**0.5
    batch = add_advantages(batch_of(1.0, 0.0, 0.5), AlgorithmConfig())
    expected = [[a, a], [-a, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert lists(batch, "advantages") == [pytest.approx(row, abs=1e-5) for row in expected]
    assert advantages_by_id(batch) == pytest.approx({"a/0": a, "a/1": -a, "b/0": 0.0}, abs=1e-5)
    centered = add_advantages(batch_of(1.0, 0.0, 0.5), AlgorithmConfig(norm_adv_by_std=False))
    assert advantages_by_id(centered) == pytest.approx({"a/0": 0.5, "a/1": -0.5, "b/0": 0.0})


def test_old_log_probs_come_from_the_trainer_or_from_sampling() -> None:
    batch = batch_of(1.0, 0.0, 0.5)
    ours = columns.jagged([torch.full((n,), -9.0) for n in (2, 3, 3)])
    with_ours = batch.union(DataProto.from_dict({"old_log_probs": ours}))
    assert "old_log_probs" not in add_old_log_probs(batch, AlgorithmConfig()).tensors()
    assert lists(add_old_log_probs(with_ours, AlgorithmConfig()), "old_log_probs")[0] == [-9.0, -9.0]
    for given in (batch, with_ours):
        replaced = add_old_log_probs(given, AlgorithmConfig(old_log_probs="rollout"))
        assert lists(replaced, "old_log_probs") == lists(batch, "rollout_log_probs")
        assert replaced.non_tensor_batch["id"].tolist() == ["a/0", "a/1", "b/0"]
        assert replaced.meta_info["temperature"] == 0.7


def test_weights_count_over_the_optimizer_batch_and_not_over_the_step() -> None:
    batch = add_advantages(batch_of(1.0, 0.0, 0.5), AlgorithmConfig())
    parts = list(optimizer_batches(batch, AlgorithmConfig(), samples_per_update=2, epochs=2))
    assert [part.non_tensor_batch["id"].tolist() for part in parts] == [["a/0", "a/1"], ["b/0"]] * 2
    third = pytest.approx(1 / 3)
    assert lists(parts[0], "loss_weights") == [[third, third], [third, 0.0, 0.0]]
    assert lists(parts[1], "loss_weights") == [[third] * 3]
    algorithm = AlgorithmConfig(loss_agg_mode="seq-mean-token-mean")
    (whole,) = optimizer_batches(batch, algorithm, samples_per_update=3, epochs=1)
    weights = [[1 / 6, 1 / 6], [1 / 3, 0.0, 0.0], [1 / 9] * 3]
    assert lists(whole, "loss_weights") == [pytest.approx(row) for row in weights]
