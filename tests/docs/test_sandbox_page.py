"""docs/sandbox.md: its command and its programs work."""

from __future__ import annotations

from pathlib import Path

from doc_pages import ROOT, Session


def test_the_page_about_the_sandbox(tmp_path: Path) -> None:
    assert Session(folder=tmp_path).follow(ROOT / "docs" / "sandbox.md") >= 3
