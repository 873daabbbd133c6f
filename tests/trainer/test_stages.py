"""Stages of a step: seconds of each."""

from __future__ import annotations

import pytest

from strop.trainer.timing import Stages


def test_a_stage_inside_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr("strop.trainer.timing.time.perf_counter", lambda: float(next(now)))
    stages = Stages()  # 0
    with stages.stage("gen"):  # 1
        with stages.stage("old_log_prob"):  # 2 to 3
            pass
        with stages.stage("ref"):  # 4 to 5
            pass
    assert stages.seconds == {"old_log_prob": 1.0, "ref": 1.0, "gen": 3.0}  # until 6
    assert stages.current == ""
