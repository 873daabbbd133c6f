"""docs/plan.md: its commands work and print what it shows."""

from __future__ import annotations

from pathlib import Path

from doc_pages import Session

ROOT = Path(__file__).parents[2]


def test_the_page_plans_a_run_that_nobody_here_could_start(tmp_path: Path) -> None:
    assert Session(folder=tmp_path).follow(ROOT / "docs" / "plan.md") == 3
