"""docs/preflight.md: its commands work and print what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_pages import ROOT, Session

from strop.observability.health import RULES


@pytest.mark.slow
def test_the_page_about_preflight(tmp_path: Path) -> None:
    assert Session(folder=tmp_path).follow(ROOT / "docs" / "preflight.md") == 5
    assert len(RULES) == 20, "the page says twenty"
