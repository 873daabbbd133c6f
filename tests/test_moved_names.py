"""Dotted names of the version before work, and name their new place."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import run_program

from strop._moved import MOVED

NAMES = [
    tuple(line.split())
    for line in (Path(__file__).parent / "snapshots" / "names_of_0_2.txt").read_text().splitlines()
]


@pytest.mark.parametrize("module", sorted({module for module, _ in NAMES}))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_that_were_public_are_found(module: str) -> None:
    names = [name for of, name in NAMES if of == module]
    assert [name for name in names if not hasattr(importlib.import_module(module), name)] == []


_IMPORT_ALL = """
import importlib, json, sys, warnings
warnings.simplefilter("always")
told = {}
for old in sys.argv[1:]:
    sys.modules.pop(old, None)
    with warnings.catch_warnings(record=True) as caught:
        importlib.import_module(old)
    told[old] = [str(w.message) for w in caught if w.category is DeprecationWarning]
print(json.dumps(told))
"""


def test_an_old_name_says_where_its_things_are() -> None:
    run = run_program(["-c", _IMPORT_ALL, *sorted(MOVED)])
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    silent = [
        old
        for old, places in MOVED.items()
        if not any(message.startswith(f"{old} is {' and '.join(places)} now") for message in told[old])
    ]
    assert silent == []


def test_a_file_of_the_users_that_uses_an_old_name_is_told(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("from strop.border.control import ControlText\n")
    run = subprocess.run(
        [sys.executable, "-c", "import strop, reward"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    assert "reward.py:1: DeprecationWarning: strop.border.control is strop.utils.sanitize" in run.stderr


def test_a_class_is_the_same_under_both_names() -> None:
    with pytest.deprecated_call(match="strop.agents.tools.base"):
        sys.modules.pop("strop.tools.base", None)
        old = importlib.import_module("strop.tools.base")
    assert old.BaseTool is importlib.import_module("strop.agents.tools.base").BaseTool


def test_names_that_never_were_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"strop\.tools\.no_such_tool"):
        importlib.import_module("strop.tools.no_such_tool")
