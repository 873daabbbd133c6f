"""docs/sft.md: its commands work with a tiny model and print what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_pages import ROOT, Session

from strop.data.tiny_model import make_tiny_model

PAGE = ROOT / "docs" / "sft.md"


def tiny(folder: Path) -> None:
    make_tiny_model(
        folder / "models" / "tiny", seed=0, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64
    )


def test_the_page_about_fine_tuning(tmp_path: Path) -> None:
    tiny(tmp_path)
    assert Session(folder=tmp_path).follow(PAGE) == 10


@pytest.mark.slow
def test_the_ranks_of_the_page_about_fine_tuning(tmp_path: Path) -> None:
    tiny(tmp_path)
    assert Session(folder=tmp_path, is_patient=True).follow(PAGE) == 11
