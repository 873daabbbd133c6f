"""docs/python.md: its program works, and the commands read what it left."""

from __future__ import annotations

from pathlib import Path

from doc_pages import ROOT, Session


def test_the_page_about_python(tmp_path: Path) -> None:
    assert Session(folder=tmp_path).follow(ROOT / "docs" / "python.md") == 4
    assert (tmp_path / "runs" / "first" / "model").is_dir()
