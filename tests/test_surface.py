"""What users see is what is committed: settings, help, presets, public names and metrics."""

from __future__ import annotations

import difflib
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "snapshots"
HINT = "where that is meant, say so in CHANGELOG.md and run tests/snapshots/surface.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The surface now, written by a process that has imported nothing else."""
    folder = tmp_path_factory.mktemp("surface")
    subprocess.run([sys.executable, FOLDER / "surface.py", folder], check=True, timeout=300)
    return folder


def compare(name: str, now: str) -> None:
    committed = (FOLDER / name).read_text(encoding="utf-8")
    lines = difflib.unified_diff(committed.splitlines(), now.splitlines(), name, "now", lineterm="", n=1)
    assert committed == now, f"{HINT}\n" + "\n".join(list(lines)[:60])


@pytest.mark.parametrize("name", ["config_keys.txt", "config_show.yaml", "presets.json", "cli_help.txt"])
def test_settings_and_help_are_the_committed_ones(name: str, made: Path) -> None:
    compare(name, (made / name).read_text(encoding="utf-8"))


def test_every_public_name_is_there() -> None:
    """Under the module that users import it from; one that moved is found there for a version, with a warning."""
    missing = []
    for line in (FOLDER / "public_names.txt").read_text(encoding="utf-8").splitlines():
        module, name = line.split()
        try:
            if not hasattr(importlib.import_module(module), name):
                importlib.import_module(f"{module}.{name}")
        except ImportError:
            missing.append(line)
    assert not missing, f"{HINT}: {missing}"


@pytest.mark.slow
def test_metrics_are_the_committed_ones(tmp_path: Path) -> None:
    subprocess.run([sys.executable, FOLDER / "surface.py", tmp_path, "--metrics"], check=True, timeout=300)
    compare("metric_names.txt", (tmp_path / "metric_names.txt").read_text(encoding="utf-8"))
