"""The tiny models of tests/references/language_models.py as fixtures, and one with heads of another size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from references.tiny_fixtures import float64_models, tiny, tiny_folder
from strop.data.tiny_model import make_tiny_model

__all__ = ["float64_models", "tiny", "tiny_folder"]


@pytest.fixture
def folder(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """Folder of a tiny model of a kind; `wide` has heads of whole vectors, as models that people use."""

    def folder_of(kind: str) -> Path:
        if kind != "wide":
            return tiny_folder(kind)
        make_tiny_model(tmp_path / kind, seed=0, num_layers=2)
        return tmp_path / kind

    return folder_of
