"""How the tests of `make test` are handed out to its processes (tests/shared_starts.py, tests/conftest.py)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shared_starts import ByWhatIsShared, scope_of

TESTS = Path(__file__).parent


def test_a_file_is_alone_or_with_those_of_the_same_start(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text("run_ranks(f, 2)")
    (tmp_path / "alone.py").write_text("f()")
    assert [scope_of(name, tmp_path) for name in ("ranks.py", "alone.py")] == ["run_ranks", "alone.py"]


@pytest.mark.parametrize(("dist", "is_ours"), [("loadfile", True), ("load", False), ("each", False)])
def test_other_ways_of_handing_out_are_those_of_xdist(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, dist: str, is_ours: bool
) -> None:
    plugin: Any = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    monkeypatch.setattr(ByWhatIsShared, "__init__", lambda *_: None)
    config = SimpleNamespace(getvalue={"dist": dist}.__getitem__)
    assert isinstance(plugin.pytest_xdist_make_scheduler(config, None), ByWhatIsShared) == is_ours
