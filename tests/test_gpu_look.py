"""`make gpu`: steps that fit into eight minutes, failures that cost themselves alone, and a rehearsal on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import steps
from benchmarks.gpu.look import Facts, Look

ROOT = Path(__file__).resolve().parents[1]


def test_all_steps_end_within_eight_minutes() -> None:
    groups = groupby(gpu.STEPS, key=lambda step: step.group)
    assert sum(max(step.limit_s for step in group) for _, group in groups) <= 8 * 60 - gpu.END_S


def test_every_step_has_its_function() -> None:
    assert [step.name for step in gpu.STEPS] == list(steps.STEPS)


def test_a_measurement_that_fails_keeps_its_facts_and_costs_itself_alone(tmp_path: Path) -> None:
    look = Look(device="cpu", out=tmp_path, step="env", deadline=time.time() + 60)

    def failing(facts: Facts) -> None:
        facts["first"] = 1
        raise RuntimeError("no such kernel")

    look.measure("failing", failing)
    look.measure("late", failing, needs_s=1000)
    look.measure("ceilings", lambda facts: facts.update(bf16_tflops=5.0))
    failed, late, fine = (json.loads(line) for line in (tmp_path / "env.jsonl").read_text().splitlines())
    assert failed["error"] == "RuntimeError: no such kernel"
    assert (failed["first"], failed["at"].split(":")[0]) == (1, "look.py")
    assert "needs about 1000" in late["skipped"]
    assert fine["bf16_tflops"] == 5.0
    assert look.num_failed == 1
    assert look.ceilings() == {"bf16_tflops": 5.0, "copy_tb_per_s": 3.0}


def test_a_step_that_ends_badly_and_one_that_hangs_have_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {"what": "measured before"}
    (tmp_path / "slow.jsonl").write_text(json.dumps(measured) + "\n")
    rows = []
    for name, code in (("bad", "raise SystemExit(3)"), ("slow", "import time; time.sleep(60)")):
        process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        now = time.time()
        running = gpu.Running(gpu.Step(name, 5, 0, ""), process, now, now + (5 if name == "bad" else 0.5))
        rows.append(gpu._end(running, tmp_path))
    assert [(row["status"], row["measured"]) for row in rows] == [("failed", []), ("stopped", [measured])]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == rows


def test_a_machine_without_a_gpu_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(gpu, "num_devices", lambda device: int(device == "cpu"))
    with pytest.raises(SystemExit, match="torch finds no GPU on this machine; `make gpu DEVICE=cpu`"):
        gpu.main()
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--only", "env,speed"])
    with pytest.raises(SystemExit, match="no step speed; there are env, tests,"):
        gpu.main()


@pytest.mark.slow
@pytest.mark.parametrize("name", [step.name for step in gpu.STEPS])
def test_a_step_runs_on_a_cpu(tmp_path: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--only", name, "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = (json.loads(line) for line in done.stdout.splitlines())
    assert row["status"] == "ok"
    assert row["measured"]
    assert name in (tmp_path / "summary.txt").read_text()
    assert not (tmp_path / "work").exists(), "models and runs are gone"
