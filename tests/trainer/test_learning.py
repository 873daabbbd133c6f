"""The policy learns: the quickstart in small."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from learning_task import LearningTask
from tiny_runs import Done, check_records, train_in

from strop.trainer.sft.result import SftResult

NUM_STEPS = 24


@dataclass(frozen=True)
class Learned:
    """A fine-tuning and the training that followed."""

    sft: SftResult
    train: Done


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """58 steps of SFT, then 24 of GRPO with a KL term: about six seconds on one core."""
    folder = tmp_path_factory.mktemp("learning")
    task = LearningTask(folder)
    return Learned(
        task.sft,
        train_in(
            folder / "train",
            task.config(None, "algorithm.use_kl_loss=true", f"trainer.max_steps={NUM_STEPS}"),
        ),
    )


def test_the_pass_rate_rises_by_twenty_points_and_more(learned: Learned) -> None:
    before, after = learned.train.result.pass_rate_start, learned.train.result.pass_rate_final
    assert 0.15 < before < 0.7, "SFT is to leave something to learn"
    assert after >= before + 0.2, (before, after)


def test_the_reward_of_the_samples_rises(learned: Learned) -> None:
    rewards = [numbers["critic/rewards/mean"] for numbers in learned.train.steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.15


def test_rollout_and_trainer_agree_from_the_first_step_to_the_last(learned: Learned) -> None:
    assert max(numbers["training/rollout_log_probs_diff_max"] for numbers in learned.train.steps) <= 1e-4


def test_the_policy_moves_away_from_a_reference_that_stays(learned: Learned) -> None:
    kl = [numbers["actor/kl_loss"] for numbers in learned.train.steps]
    assert abs(kl[0]) < 1e-6
    assert kl[-1] > 1e-3


def test_every_sample_was_trained_once(learned: Learned) -> None:
    check_records(learned.train.folder, num_steps=NUM_STEPS)
    assert learned.sft.loss < 1.0
