"""A project of tiny runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainer.tiny_runs import Project, make_project

from strop.cli.quickstart.task import TaskFiles


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_task: TaskFiles) -> Project:
    """Settings and files of runs that take a second."""
    return make_project(tmp_path_factory.mktemp("runs"), tiny_model, tiny_task)
