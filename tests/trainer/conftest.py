"""A project of tiny runs, and the run that most tests look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_runs import Done, Project, make_project, train_in
from tried_rewards import rewards_are_tried, rewards_are_tried_once
from virtual_clock import virtual_clock

from strop.cli.quickstart.task import TaskFiles

__all__ = ["rewards_are_tried", "rewards_are_tried_once"]


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_task: TaskFiles) -> Project:
    """Settings and files of runs that take a second."""
    return make_project(tmp_path_factory.mktemp("runs"), tiny_model, tiny_task)


@pytest.fixture(scope="session")
def on_policy(project: Project) -> Done:
    """Three steps of GRPO with one update each and a KL term."""
    config = project.config(
        "algorithm.use_kl_loss=true", "algorithm.kl_loss_type=abs", "algorithm.kl_loss_coef=0.01"
    )
    return train_in(project.folder / "on-policy", config)


@pytest.fixture
def engine_clock() -> Iterator[None]:
    """Runs go by a clock of engine steps."""
    with virtual_clock():
        yield
