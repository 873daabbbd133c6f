"""docs/worker-groups.md: its programs print what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_pages import ROOT, Session, blocks

PAGE = ROOT / "docs" / "worker-groups.md"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_page_about_worker_groups(tmp_path: Path) -> None:
    session = Session(folder=tmp_path, is_patient=True)
    session.follow(PAGE)
    assert len(session.transcript) == 2


def test_the_example_is_short() -> None:
    example = next(block for block in blocks(PAGE) if "file" in block.notes)
    assert 30 <= len([line for line in example.text.splitlines() if line.strip()]) <= 45
