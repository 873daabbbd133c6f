"""A process without a model, measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from plan_configs import config_of

from strop.trainer.plan import baseline as module
from strop.trainer.plan.baseline import ASSUMED, Baseline, baseline, baseline_of


@pytest.mark.slow
def test_ranks_say_what_it_costs_them_to_talk() -> None:
    measured = baseline.__wrapped__(is_one_of_several=True)
    assert 100 << 20 < measured.num_bytes < 4 << 30
    assert 0 < measured.call_s < 1
    assert measured.bytes_per_s > 1e6


@pytest.mark.parametrize(
    "program", ["raise SystemExit(3)", "print('a warning')", "print('[1]')", "print('{}')", ""]
)
def test_a_process_that_does_not_say_it_is_assumed(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(module, "_PROCESS", program)
    monkeypatch.setattr(module, "_ONE", "")
    assert baseline.__wrapped__() == ASSUMED
    assert not ASSUMED.is_measured


def test_a_process_that_does_not_end_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROCESS", "import time\ntime.sleep(60)")
    monkeypatch.setattr(module, "TIMEOUT_S", 0.05)
    assert baseline.__wrapped__() == ASSUMED


def test_ranks_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that fails or waits for ever is assumed too, and no process is left."""
    pid = tmp_path / "pid"
    monkeypatch.setattr(module, "_PROCESS", f"import os, sys, time\npid = {str(pid)!r}\n")
    monkeypatch.setattr(module, "TIMEOUT_S", 1.0)
    said = "print('{\"num_bytes\": 5}')"
    for of_second in ("sys.exit(1)", "open(pid, 'w').write(str(os.getpid())); time.sleep(60)"):
        monkeypatch.setattr(module, "_TWO", f"if sys.argv[1] == '1': {of_second}\n{said}")
        assert baseline.__wrapped__(is_one_of_several=True) == ASSUMED
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    monkeypatch.setattr(module, "_TWO", said)
    assert baseline.__wrapped__(is_one_of_several=True) == Baseline(num_bytes=5)


def test_a_process_that_says_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROCESS", "import json\ndef most():\n    return 5\nprint('a warning')\n")
    assert baseline.__wrapped__() == Baseline(num_bytes=5, is_measured=True)


def test_ranks_of_a_run_are_measured_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(module, "baseline", lambda **how: asked.append(how))
    baseline_of(config_of(tmp_path))
    baseline_of(config_of(tmp_path, "resources.runtime=ray", "resources.ranks=2"))
    assert asked == [
        {"uses_ray": False, "is_one_of_several": False},
        {"uses_ray": True, "is_one_of_several": True},
    ]
