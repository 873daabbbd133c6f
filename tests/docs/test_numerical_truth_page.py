"""docs/numerical-truth.md: its commands find what it says they find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_pages import ROOT, Session

from strop.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from strop.algorithms.losses import POLICY_LOSS_REGISTRY
from strop.algorithms.registry import FunctionRegistry


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    registries: list[FunctionRegistry[Any]] = [POLICY_LOSS_REGISTRY, ADV_ESTIMATOR_REGISTRY]
    held = [(one, dict(one), dict(one.declarations)) for one in registries]
    yield
    for registry, functions, declarations in held:
        registry.clear()
        registry.update(functions)
        registry.declarations.clear()
        registry.declarations.update(declarations)


def test_the_page_about_numerical_truth(tmp_path: Path) -> None:
    assert Session(folder=tmp_path).follow(ROOT / "docs" / "numerical-truth.md") == 2
