"""`make gpu`: steps that fit into eight minutes, failures that cost themselves alone, and a rehearsal on a CPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import checks, generation, kernels, steps
from benchmarks.gpu.checks import outcomes_so_far
from benchmarks.gpu.look import Facts, Look
from benchmarks.gpu.memory import check_lowered, check_sentence
from benchmarks.gpu.workload import loaded
from strop.engines.attention import PackedAttention
from strop.engines.attention_form import AttentionForm
from strop.rollout.native.batch import DecodeBatch

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


def test_measurements_say_which_rates_of_the_device_are_not_its_own(tmp_path: Path) -> None:
    look = Look(device="cpu", out=tmp_path, step="env", deadline=time.time() + 60)
    facts: Facts = {}
    assert look.ceilings(facts) == facts["rates_of_an_h100"] == {"bf16_tflops": 770.0, "copy_tb_per_s": 3.0}
    look.measure("ceilings", lambda facts: facts.update(bf16_tflops=5.0))
    assert look.ceilings(facts) == {"bf16_tflops": 5.0, "copy_tb_per_s": 3.0}
    assert facts["rates_of_an_h100"] == {"copy_tb_per_s": 3.0}
    look.measure("ceilings", lambda facts: facts.update(copy_tb_per_s=2.0))
    own: Facts = {}
    assert look.ceilings(own) == {"bf16_tflops": 5.0, "copy_tb_per_s": 2.0}
    assert own == {}


def test_steps_side_by_side_have_their_lines_when_each_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {"what": "measured before"}
    (tmp_path / "slow.jsonl").write_text(json.dumps(measured) + "\n")
    programs = {"slow": "import time; time.sleep(60)", "bad": "raise SystemExit(3)", "fine": "pass"}
    monkeypatch.setattr(gpu, "_command", lambda name, *_: [sys.executable, "-c", programs[name]])
    monkeypatch.setattr(gpu, "LEAST_S", 0.0)
    steps = [gpu.Step("slow", 4, 0, ""), gpu.Step("bad", 30, 0, ""), gpu.Step("fine", 30, 0, "")]
    begin = time.time()
    *early, late = gpu._run(steps, tmp_path, begin + 100, "cuda")
    assert sorted((row["step"], row["status"]) for row in early) == [("bad", "failed"), ("fine", "ok")]
    assert all(row["seconds"] < late["seconds"] for row in early)
    assert (late["step"], late["status"], late["measured"]) == ("slow", "stopped", [measured])
    assert late["why"] == "at its limit of 4 s"
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [*early, late]


def test_a_step_has_the_time_that_earlier_ones_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = []

    def command(name: str, device: str, out: Path, deadline: float) -> list[str]:
        deadlines.append(deadline)
        return [sys.executable, "-c", "pass"]

    monkeypatch.setattr(gpu, "_command", command)
    step, begin = gpu.Step("fine", 30, 0, ""), time.time()
    for left_s, end in ((0.0, 1000), (-5.0, 1000), (20.0, 1000), (20.0, 40)):
        gpu._run([step], tmp_path, begin + end, "cuda", left_s=left_s)
    assert [round(deadline - begin, -1) for deadline in deadlines] == pytest.approx([30, 30, 50, 40], abs=6)


SAID = """
tests/a.py::test_one[x y] PASSED                          [ 25%]
tests/a.py::test_two SKIPPED (why)                        [ 50%]
tests/b.py::test_three FAILED                             [ 75%]
tests/b.py::test_four """


@pytest.mark.parametrize(
    "end", ["", "Fatal Python error: Aborted\n\nThread 0x00007f (most recent call first):\n"]
)
def test_tests_that_ended_before_one_that_hangs_or_kills_are_known(end: str) -> None:
    assert outcomes_so_far(SAID + end) == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "failures": {"tests/b.py::test_three": ""},
        "running": ["tests/b.py::test_four"],
    }


def test_a_file_of_tests_that_kills_its_process_costs_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = {
        "fine": "def test_one():\n    pass\ndef test_two():\n    assert 0\n",
        "fatal": "import os\ndef test_one():\n    pass\ndef test_two():\n    os.abort()\n",
        "lacking": "import a_package_that_is_not_there\n",
    }
    (tmp_path / "tests").mkdir()
    for name, text in tests.items():
        (tmp_path / "tests" / f"test_{name}.py").write_text(
            f"import pytest\npytestmark = pytest.mark.{'gpu'}\n{text}"
        )
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    look = Look(device="cpu", out=tmp_path / "out", step="tests", deadline=time.time() + 60)
    facts: Facts = {}
    with pytest.raises(
        RuntimeError,
        match=r"2 of the tests marked gpu failed; look at tests/test_fatal\.py, .*_fine.*_lacking",
    ):
        checks._tests(look, facts)
    assert (facts["passed"], facts["failed"]) == (2, 2)
    files = {Path(file).stem: result for file, result in facts["files"].items()}
    assert files["test_fatal"]["running"] == ["tests/test_fatal.py::test_two"]
    assert files["test_fatal"]["exit"] == -signal.SIGABRT
    assert files["test_fine"]["failures"] == {"test_two": "assert 0"}
    assert "a_package_that_is_not_there" in files["test_lacking"]["failures"]["tests.test_lacking"]


INTERRUPTED = """
import sys
from benchmarks.gpu import __main__ as gpu

program = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
gpu._command = lambda *_: [sys.executable, "-c", program]
sys.argv = ["gpu", "--device", "cpu", "--only", "env", "--out", sys.argv[1]]
gpu.main()
"""


def test_a_call_that_is_ended_ends_its_steps_and_the_next_one_takes_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "work" / "model").mkdir(parents=True)
    log = tmp_path / "env.log"
    call = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(tmp_path)], cwd=ROOT)
    try:
        until = time.time() + 60
        while not (log.is_file() and log.read_text().endswith("\n")) and time.time() < until:
            time.sleep(0.05)
        assert not (tmp_path / "work").exists(), "a toy of an earlier call"
        step = Path(f"/proc/{log.read_text().strip()}")
        assert step.exists()
        call.terminate()
        assert call.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        call.kill()
    assert not step.exists()
    assert (tmp_path / "summary.txt").is_file()


def test_rows_of_one_prompt_are_planned_for_the_step_of_kernels() -> None:
    prompt, *responses = kernels.responses_of_one_prompt(2, 16)
    assert (prompt.start, prompt.num_keys) == (0, 16)
    assert [(one.start, one.length, one.num_keys) for one in responses] == [(16, 16, 32), (32, 16, 32)]
    states = torch.zeros(48, 1, 8)
    plan = PackedAttention([prompt, *responses], device=torch.device("cpu"))
    assert plan.attend(0, states, states, states, AttentionForm(scaling=1.0)).shape == (48, 1, 8)


def test_decode_steps_are_profiled_where_tokens_are_read_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card."""

    class ReadsBehind(DecodeBatch):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._reads_behind = True

    monkeypatch.setattr(generation, "DecodeBatch", ReadsBehind)
    look = Look(device="cpu", out=tmp_path, step="rollout", deadline=time.time() + 60)
    facts: Facts = {}
    generation._profile(look, loaded(look, "bfloat16"), (2, 3), facts)
    assert {"profile_2", "profile_3"} < set(facts)


SENTENCE = (
    "the device has no memory left: x. Lower actor.engine.max_tokens_per_device, set "
    "model.gradient_checkpointing=true, or lower rollout.max_running"
)


@pytest.mark.parametrize(
    ("code", "said", "error"),
    [
        (0, SENTENCE, "its memory was enough"),
        (1, f"Traceback (most recent call last):\n{SENTENCE}", "a person reads a traceback"),
        (1, SENTENCE.replace("rollout.max_running", "something"), "does not name rollout.max_running"),
        (
            1,
            "",
            "does not name actor.engine.max_tokens_per_device, model.gradient_checkpointing, rollout.max",
        ),
    ],
)
def test_a_run_that_is_to_have_no_memory_passes_with_its_sentence_alone(
    code: int, said: str, error: str
) -> None:
    check_sentence(1, SENTENCE)
    with pytest.raises(RuntimeError, match=error):
        check_sentence(code, said)


@pytest.mark.parametrize(
    ("code", "said", "held", "error"),
    [
        (0, "", [], "no token budget was lowered"),
        (1, "Traceback", [512], "a person reads a traceback"),
        (2, "CUDA out of memory", [], "does not name engine.max_tokens_per_device of the role"),
    ],
)
def test_a_run_with_little_memory_passes_with_smaller_micro_batches_or_the_sentence(
    code: int, said: str, held: list[int], error: str
) -> None:
    check_lowered(0, "WARNING", [8192, 512])
    check_lowered(2, "no smaller engine.max_tokens_per_device of this role helps", [512])
    with pytest.raises(RuntimeError, match=error):
        check_lowered(code, said, held)


def test_a_machine_without_a_gpu_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(gpu, "num_devices", lambda device: int(device == "cpu"))
    with pytest.raises(SystemExit, match="torch finds no GPU on this machine; `make gpu DEVICE=cpu`"):
        gpu.main()
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--only", "env,speed"])
    with pytest.raises(SystemExit, match="no step speed; there are env, tests,"):
        gpu.main()


def test_a_machine_with_an_older_transformers_is_told_at_once() -> None:
    gpu.check_transformers("5.23.0")
    with pytest.raises(
        SystemExit, match=r"transformers 5\.17\.0 is installed, and strop needs transformers>=5\."
    ):
        gpu.check_transformers("5.17.0")


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
