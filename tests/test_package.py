from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import strop


def test_public_names_arrive_on_first_use_and_unknown_ones_are_listed() -> None:
    assert strop.Trajectory.__module__ == "strop.protocol.trajectory"
    assert {"DataProto", "Prompt", "__version__"} <= set(dir(strop))
    with pytest.raises(AttributeError, match="no attribute 'nothing'; it offers DataProto"):
        strop.nothing  # noqa: B018


def test_every_marker_of_the_tests_is_carried_by_one() -> None:
    # A target of the Makefile that selects a marker which no test has would run nothing.
    root = Path(__file__).parent
    settings = tomllib.loads((root.parent / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    sources = [path.read_text() for path in root.rglob("test_*.py")]
    names = [line.split(":")[0] for line in settings["markers"]]
    assert "gpu" in names
    assert [name for name in names if not any(f"mark.{name}" in source for source in sources)] == []


def test_every_test_folder_that_is_named_is_there() -> None:
    # A target of the Makefile that names a folder which is gone ends before its first test.
    root = Path(__file__).parent.parent
    pages = [root / "Makefile", root / "CONTRIBUTING.md", root / "README.md", *(root / "docs").rglob("*.md")]
    named = {
        (page.name, path)
        for page in pages
        for path in re.findall(r"(?<![\w/])tests/[\w/.]*\w", page.read_text())
    }
    assert ("Makefile", "tests/docs") in named
    assert sorted(pair for pair in named if not (root / pair[1]).exists()) == []
