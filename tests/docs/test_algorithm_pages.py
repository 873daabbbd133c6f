"""The pages about algorithms: their commands work, and a user's file of docs/algorithms.md keeps every rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import ROOT, Session

from strop.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from strop.algorithms.losses import POLICY_LOSS_REGISTRY


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    held = [
        (one, dict(one), dict(one._declarations)) for one in (POLICY_LOSS_REGISTRY, ADV_ESTIMATOR_REGISTRY)
    ]
    yield
    for registry, functions, declarations in held:
        registry.clear()
        registry.update(functions)
        registry._declarations.clear()
        registry._declarations.update(declarations)


@pytest.mark.parametrize(("name", "num_blocks"), [("algorithms.md", 4), ("papers.md", 1)])
def test_commands_of_the_algorithm_pages(tmp_path: Path, name: str, num_blocks: int) -> None:
    assert Session(folder=tmp_path).follow(ROOT / "docs" / name) == num_blocks
