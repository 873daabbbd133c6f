"""Runs that benchmarks/plan.py watches: they end, and their last step is seen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_modules import benchmark_module


@pytest.fixture
def plan() -> ModuleType:
    return benchmark_module("plan")


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let a script take the place of strop: its fifth argument is the folder of the run."""
    script = folder / "script"
    script.write_text(f"#!/bin/sh\nmkdir -p $5\n{text}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_a_run_that_does_not_end_is_ended(
    plan: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, monkeypatch, "echo $$ > $5/pid; exec sleep 60")
    monkeypatch.setattr(plan, "CASE_LIMIT_S", 0.3)
    with pytest.raises(plan.CaseError, match="it failed, or took more than 0 s"):
        plan.run([], tmp_path / "run", ranks=1)
    pid = int((tmp_path / "run" / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_a_run_that_is_deaf_is_killed(plan: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(
        ["/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"ready\n"
        monkeypatch.setattr(plan, "GRACE_S", 0.1)
        plan.stop(process)
    assert process.returncode == -9


def test_a_run_that_fails_says_its_last_words(
    plan: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, monkeypatch, "echo no memory; exit 3")
    with pytest.raises(plan.CaseError, match="no memory"):
        plan.run([], tmp_path / "run", ranks=1)


def test_a_case_that_fails_loses_none_of_the_others(
    plan: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(case: object, folder: Path) -> dict[str, float]:
        if folder.name == "small":
            raise plan.CaseError("no memory")
        return {"memory_ratio": 1.1, "time_ratio": 0.8}

    monkeypatch.setattr(plan, "measured", measured)
    monkeypatch.setattr(plan, "baseline", lambda **_: None)
    monkeypatch.setattr(sys, "argv", ["plan.py", "--json", "--cases", "small|middle"])
    with pytest.raises(SystemExit) as ended:
        plan.main()
    said = json.loads(capsys.readouterr().out)
    assert ended.value.code == 1
    assert said["failed"] == {"small": "no memory"}
    assert said["cases"] == {"middle": {"memory_ratio": 1.1, "time_ratio": 0.8}}
    assert said["not_run"] == []


def test_the_last_step_of_a_process_that_is_gone_is_seen(plan: ModuleType, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("{}\n")
    process = subprocess.Popen(["/bin/sh", "-c", "read line"], stdin=subprocess.PIPE)
    seen = plan.Seen(metrics=metrics, ranks=1, seconds=5.0)
    seen.look(process.pid)
    process.communicate()
    metrics.write_text("{}\n{}\n")
    seen.look(process.pid)
    assert seen.at_step == {1: 5.0, 2: 5.0}
    assert seen.peaks[process.pid] > 0
