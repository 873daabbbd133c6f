"""The policy learns: the quickstart in small."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_runs import Done, check_records, train_in

from strop.config import load_config
from strop.data.tasks import write_task
from strop.data.tiny import make_tiny_model
from strop.trainer.config import Config
from strop.trainer.launch import start_run
from strop.trainer.supervised import SftResult, fine_tune


@dataclass(frozen=True)
class Learned:
    """A fine-tuning and the training that followed."""

    sft: SftResult
    train: Done


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """58 steps of SFT, then 40 of GRPO with a KL term: about ten seconds on one core."""
    folder = tmp_path_factory.mktemp("learning")
    make_tiny_model(
        folder / "model",
        seed=0,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=192,
        max_position_embeddings=64,
    )
    task = write_task(
        folder / "data",
        seed=0,
        num_train=500,
        num_val=100,
        num_sft=700,
        min_letters=3,
        max_letters=3,
        alphabet="abcdefghijkl",
    )
    settings = [
        f"data.train_files=['{task.train}']",
        f"data.val_files=['{task.val}']",
        f"sft.data.train_files=['{task.sft}']",
        "sft.examples_per_update=32",
        "sft.num_epochs=3",
        "sft.max_steps=58",
        "sft.optim.lr=4e-3",
        "data.prompts_per_step=16",
        "rollout.samples_per_prompt=16",
        "actor.optim.lr=1e-3",
        "algorithm.use_kl_loss=true",
        "trainer.num_epochs=2",
        "trainer.max_steps=40",
        "trainer.trackers=[jsonl]",
        "eval.every=0",
        "run.save_every=0",
        "reward.num_workers=1",
        "resources.num_threads=1",
    ]

    def config(model: Path) -> Config:
        return load_config(Config, source="quickstart", overrides=[f"model.path='{model}'", *settings])

    start = start_run(folder / "sft", config(folder / "model"), command=["strop", "sft"])
    with start.run:
        sft = fine_tune(start.config, start.run, say=lambda line: None)
    return Learned(sft, train_in(folder / "train", config(sft.model)))


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
    check_records(learned.train.folder, num_steps=40)
    assert learned.sft.loss < 1.0
