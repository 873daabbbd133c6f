"""The tiny models of tests/references/language_models.py as fixtures, and models that are divided over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from references.engine_steps import value_model
from references.language_models import config, save_model
from references.tiny_fixtures import float64_models, tiny, tiny_folder
from strop.engines.model_support import parity

__all__ = ["float64_models", "tiny", "tiny_folder"]


@pytest.fixture
def nothing_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has compared no architecture yet: for a test that patches what is compared, since a class whose own
    pass is another one is remembered as it was."""
    monkeypatch.setattr(parity, "_AGREED", set())


@pytest.fixture(scope="session")
def value_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that gives a number per token."""
    folder = tmp_path_factory.mktemp("value_model")
    value_model(folder)
    return folder


@pytest.fixture(scope="session")
def five_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers do not divide evenly."""
    folder = tmp_path_factory.mktemp("five_layers")
    shape = config("qwen3")
    shape.num_hidden_layers, shape.layer_types = 5, ["full_attention"] * 5
    save_model(shape, folder)
    return folder
