"""Preflights of real runs: the samples are those of the first step, and what is wrong is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import Done, Project, with_reward

from strop.cli.main import main
from strop.config import save_config
from strop.trainer.preflight import run_preflight


def test_its_samples_are_those_of_the_first_step(project: Project, on_policy: Done) -> None:
    found = run_preflight(project.config(), num_prompts=4)
    first = on_policy.records[0].reports
    assert [row["id"] for row in found.samples] == [report.id for report in first]
    assert [row["score"] for row in found.samples] == [report.score for report in first]
    checks = {check.name: check for check in found.checks}
    assert checks["engine"].is_fine
    assert checks["signal"].is_fine
    assert found.seconds > 0


def test_a_reward_that_is_always_the_same_is_found(project: Project, tmp_path: Path) -> None:
    (tmp_path / "flat.py").write_text("def compute_score(**row):\n    return 0.0\n")
    config = with_reward(project.config(), path=str(tmp_path / "flat.py"))
    found = run_preflight(config, num_prompts=3)
    assert not found.is_fine
    (signal,) = [check for check in found.checks if check.name == "signal"]
    assert "of 3 groups 0 can teach, 0 are solved by every sample, 3 by none" in signal.text


def test_the_command_shows_answers_and_ends_with_the_verdict(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_config(project.config(), tmp_path / "run.yaml")
    assert main(["check", str(tmp_path / "run.yaml"), "--prompts", "3"]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert sum(", right is " in line for line in lines) == 10
    assert any(
        line.startswith("ok   engine: the engine's and the trainer's log-probs differ") for line in lines
    )
    assert main(["check", str(tmp_path / "run.yaml"), "--prompts", "3", "--json"]) in (0, 1)
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["kind"] == "run"
    assert {check["name"] for check in record["checks"]} >= {
        "prompts",
        "length",
        "scoring",
        "signal",
        "engine",
    }
    assert not list(tmp_path.glob("runs/*")), "nothing is written"
