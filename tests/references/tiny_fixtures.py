"""Fixtures of the tiny models, for the tests of engines and of rollout; each model is written once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from references.language_models import exact_norms, save_tiny
from strop.engines.causal_lm import CausalLM
from strop.engines.config import ModelConfig
from strop.engines.model import load_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the tiny model of a kind."""
    transformers.utils.logging.disable_progress_bar()
    root = tmp_path_factory.mktemp("tiny_models")

    def folder(kind: str) -> Path:
        path = root / kind
        if not path.exists():
            save_tiny(kind, path)
        return path

    return folder


@pytest.fixture
def tiny(tiny_folder: Callable[[str], Path]) -> Callable[..., CausalLM]:
    """The tiny model of a kind, loaded for packed computation."""

    def load(kind: str, *, dtype: str = "float64", device: str = "cpu", **options: Any) -> CausalLM:
        return load_model(ModelConfig(path=str(tiny_folder(kind)), dtype=dtype, **options), device=device)

    return load


@pytest.fixture(scope="module")
def float64_models() -> Iterator[None]:
    """Norms compute in float64 when the model does."""
    with exact_norms():
        yield
