"""docs/agents.md: its commands work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import ROOT, Session

from strop.agents.tools.functions import FUNCTION_TOOL_REGISTRY
from strop.run import RunFolder


@pytest.fixture(autouse=True)
def _tools_of_the_page() -> Iterator[None]:
    known = dict(FUNCTION_TOOL_REGISTRY)
    yield
    FUNCTION_TOOL_REGISTRY.clear()
    FUNCTION_TOOL_REGISTRY.update(known)


@pytest.mark.slow
def test_the_page_about_agents(tmp_path: Path) -> None:
    session = Session(folder=tmp_path)
    assert session.follow(ROOT / "docs" / "agents.md") == 1
    check(tmp_path / "runs" / "tools", "tool_agent")


@pytest.mark.slow
def test_the_slow_part_of_the_page_about_agents(tmp_path: Path) -> None:
    session = Session(folder=tmp_path, is_patient=True)
    assert session.follow(ROOT / "docs" / "agents.md") == 2
    check(tmp_path / "runs" / "twice", "twice")


def check(folder: Path, agent: str) -> None:
    with RunFolder.open(folder, read_only=True) as run:
        assert {row["agent_name"] for row in run.samples.read(2)} == {agent}
        run.ledger.check()
