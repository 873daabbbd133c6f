"""docs/gateway.md: its commands work."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_pages import ROOT, Session

from strop.run import RunFolder


@pytest.mark.slow
def test_the_page_about_the_gateway(tmp_path: Path) -> None:
    session = Session(folder=tmp_path, is_patient=True)
    assert session.follow(ROOT / "docs" / "gateway.md") == 2
    with RunFolder.open(tmp_path / "runs" / "agent", read_only=True) as run:
        assert {row["agent_name"] for row in run.samples.read(1)} == {"openai_agent"}
        run.ledger.check()
