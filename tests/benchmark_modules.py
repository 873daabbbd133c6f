"""Modules of benchmarks/, which import each other by their plain names, as scripts of one folder do, and git for those
that compare commits."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def benchmark_module(name: str) -> ModuleType:
    """A module of benchmarks/, with the path as it was."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


def git(root: Path, *words: str) -> str:
    """Output of a git command in a repository."""
    names = ("-c", "user.name=t", "-c", "user.email=t@t")
    return subprocess.run(
        ["git", *names, *words], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()
