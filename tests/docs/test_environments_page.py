"""docs/environments.md: its commands work."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_pages import ROOT, Session


@pytest.mark.slow
def test_the_page_about_environments(tmp_path: Path) -> None:
    assert Session(folder=tmp_path).follow(ROOT / "docs" / "environments.md") == 2
