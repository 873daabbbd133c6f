"""A project of tiny runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from preference_task import Task


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Task:
    return Task(tmp_path_factory.mktemp("preferences"), tiny_model)
