"""docs/preferences.md: its commands work with a tiny model and print what it shows."""

from __future__ import annotations

from pathlib import Path

from doc_pages import ROOT, Session

from strop.data.tiny_model import make_tiny_model


def test_the_page_about_preferences(tmp_path: Path) -> None:
    make_tiny_model(
        tmp_path / "models" / "tiny", seed=0, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64
    )
    assert Session(folder=tmp_path).follow(ROOT / "docs" / "preferences.md") == 4
