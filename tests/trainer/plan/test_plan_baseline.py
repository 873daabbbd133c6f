"""A process without a model, measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_configs import config_of

from strop.trainer.plan import baseline as module
from strop.trainer.plan.baseline import ASSUMED, baseline, baseline_of


@pytest.mark.slow
def test_ranks_say_what_it_costs_them_to_talk() -> None:
    measured = baseline.__wrapped__(is_one_of_several=True)
    assert 100 << 20 < measured.num_bytes < 4 << 30
    assert 0 < measured.call_s < 1
    assert measured.bytes_per_s > 1e6


def test_a_process_that_fails_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROCESS", "raise SystemExit(3)")
    assert baseline.__wrapped__() == ASSUMED


def test_ranks_of_a_run_are_measured_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(module, "baseline", lambda **how: asked.append(how))
    baseline_of(config_of(tmp_path))
    baseline_of(config_of(tmp_path, "resources.runtime=ray", "resources.ranks=2"))
    assert asked == [
        {"uses_ray": False, "is_one_of_several": False},
        {"uses_ray": True, "is_one_of_several": True},
    ]
