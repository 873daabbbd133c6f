"""How the tests of `make test` are handed out to its processes (tests/shared_starts.py, tests/conftest.py)."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from compiled_once import compile_share
from shared_starts import LONG, SHARED, ByWhatIsShared, scope_of
from xdist.scheduler import LoadFileScheduling

TESTS = Path(__file__).parent


def test_a_file_is_alone_or_with_those_that_share_something(tmp_path: Path) -> None:
    texts = {
        "ranks.py": "run_ranks(f, 2)",
        "page.py": "import doc_pages",
        "alone.py": "f(trained_model: Path)",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    first, second, alone = (scope_of(name, tmp_path) for name in texts)
    assert first == second != alone == "alone.py"


def test_all_that_is_shared_is_used() -> None:
    scopes = {scope_of(str(file), TESTS) for file in TESTS.rglob("test_*.py") if file != Path(__file__)}
    assert scopes >= SHARED.keys()


def test_files_of_few_long_tests_are_not_left_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [file for file in LONG if scope_of(file, TESTS.parent) != file]

    def schedule(self: ByWhatIsShared) -> None:
        self.workqueue = OrderedDict.fromkeys(["tests/test_a.py", LONG[1], "tests/test_b.py", LONG[0]])

    monkeypatch.setattr(LoadFileScheduling, "schedule", schedule)
    tests = ByWhatIsShared.__new__(ByWhatIsShared)
    tests.schedule()
    assert list(tests.workqueue) == [*LONG[:2], "tests/test_a.py", "tests/test_b.py"]


def test_a_process_compiles_its_share_of_the_files_and_runs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    files = [tmp_path / f"test_{name}.py" for name in "abcd"]
    for file in files:
        file.write_text("raise RuntimeError\n")
    files[1].write_text("def of no name\n")
    with monkeypatch.context() as plain:
        plain.setattr(sys, "meta_path", [])
        compile_share(files, 1, 2)
    assert not list(tmp_path.rglob("*.pyc"))
    compile_share(files, 1, 2)
    assert [path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")] == ["test_d"]


@pytest.mark.parametrize(("dist", "is_ours"), [("loadfile", True), ("load", False), ("each", False)])
def test_other_ways_of_handing_out_are_those_of_xdist(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, dist: str, is_ours: bool
) -> None:
    plugin: Any = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    monkeypatch.setattr(ByWhatIsShared, "__init__", lambda *_: None)
    config = SimpleNamespace(getvalue={"dist": dist}.__getitem__)
    assert isinstance(plugin.pytest_xdist_make_scheduler(config, None), ByWhatIsShared) == is_ours
