"""What the tests of migrations share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def no_engines(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine but strop's own is installed, whatever this machine has."""
    nowhere: Path = tmp_path_factory.getbasetemp() / "nowhere"
    monkeypatch.setenv("XDG_CACHE_HOME", str(nowhere))
    for name in ("STROP_VLLM", "STROP_SGLANG"):
        monkeypatch.delenv(name, raising=False)
