"""Files of tools, interactions and loops that cannot be read are one sentence without the text of the system."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.agents.interactions.loading import load_interactions
from strop.agents.tools.loading import load_tool_classes
from strop.agents.verl_loops.plugin import loops_from_yaml


@pytest.mark.parametrize(
    ("setting", "load"),
    [
        ("agent.tools", load_tool_classes),
        ("agent.interactions", load_interactions),
        ("agent.loops", loops_from_yaml),
    ],
)
def test_a_missing_file_is_named_with_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, load: Callable[[str], Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=f"^{setting} names 'none.yaml', but {tmp_path}/none.yaml is no file; rel"
    ):
        load("none.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=f"^{setting} names 'bad.yaml', which cannot be read: "):
        load("bad.yaml")
