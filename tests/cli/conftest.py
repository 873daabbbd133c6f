"""A tiny model, its data and a few runs, made once; and the command line in this process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_calls import Project, cli, interrupted_after
from tried_rewards import rewards_are_tried, rewards_are_tried_once

from strop.cli.quickstart.task import write_task
from strop.data.tiny_model import make_tiny_model

__all__ = ["rewards_are_tried", "rewards_are_tried_once"]

CONFIG = """\
model: {{path: '{folder}/model'}}
data:
  train_files: ['{folder}/data/train.parquet']
  val_files: ['{folder}/data/val.parquet']
  prompts_per_step: 3
  max_prompt_tokens: 32
  max_response_tokens: 6
sft:
  data: {{train_files: ['{folder}/data/sft.parquet'], val_files: ['{folder}/data/val-sft.parquet'], max_tokens: 64}}
  max_steps: 2
  examples_per_update: 4
rollout: {{samples_per_prompt: 2}}
reward: {{num_workers: 1, path: '{folder}/reward.py'}}
trainer: {{max_steps: 2, trackers: [console, jsonl], preflight: false}}
run: {{save_every: 1}}
resources: {{num_threads: 1}}
"""

REWARD = '''\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Right answers score 1; others by their first character, so that an untrained model has a signal."""
    return {"score": 1.0 if solution_str == ground_truth else ord((solution_str or " ")[0]) % 7 / 10, "acc": False}
'''


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Model, data, reward function and configuration of a small task."""
    folder = tmp_path_factory.mktemp("cli")
    make_tiny_model(
        folder / "model",
        seed=0,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    write_task(folder / "data", seed=0, num_train=12, num_val=4, num_sft=8)
    shutil.copy(folder / "data" / "sft.parquet", folder / "data" / "val-sft.parquet")
    (folder / "reward.py").write_text(REWARD)
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    return Project(folder)


@pytest.fixture(scope="session")
def trained(project: Project) -> Path:
    """A finished run of two steps, seed 0."""
    run = project.folder / "trained"
    assert cli("train", "--config", project.config, "--out", run).code == 0
    return run


@pytest.fixture(scope="session")
def interrupted(project: Project) -> Path:
    """The same run, interrupted before its second step. Copy it before you continue it."""
    run = project.folder / "interrupted"
    with interrupted_after(step=1):
        result = cli("train", "--config", project.config, "--out", run)
    assert result.code == 130, result.err
    return run


@pytest.fixture(scope="session")
def other_seed(project: Project) -> Path:
    """A finished run of seed 1."""
    run = project.folder / "other-seed"
    assert cli("train", "--config", project.config, "--out", run, "trainer.seed=1").code == 0
    return run


@pytest.fixture(scope="session")
def tuned(project: Project) -> Path:
    """A finished fine-tuning."""
    run = project.folder / "tuned"
    assert cli("sft", "--config", project.config, "--out", run).code == 0
    return run
