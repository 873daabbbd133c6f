"""The example with an agent that talks to OpenAI's API: its calls are the episodes of a run, and it learns."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from example_files import REPO, load_example, read, train

from strop.observability.trackers.setup import METRICS_FILE, read_metrics
from strop.run import RunFolder


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; the current directory is the root, where the example's paths start."""
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return load_example("openai_agent/prepare.py")


def test_the_agent_knows_nothing_of_strop() -> None:
    source = (REPO / "examples" / "openai_agent" / "agent.py").read_text()
    assert "import strop" not in source
    assert "from strop" not in source


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ('{"expression": "12*34"}', "408"),
        ('{"expression": "12 * 34"}', "408"),
        ('{"expression": "12+34"}', "not two numbers"),
        ('{"expression": "1' + "0" * 99 + '*2"}', "not two numbers"),
        ("{}", "no expression"),
        ("12*34", "no expression"),
        ("[]", "no expression"),
    ],
)
def test_its_calculator_answers_whatever_the_model_writes(arguments: str, result: str) -> None:
    assert load_example("openai_agent/agent.py").multiply(arguments) == result


@pytest.mark.timeout(120)
def test_one_step_of_the_example_plays_the_agent(
    prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {
        "--out": str(tmp_path),
        "--num-train": "8",
        "--num-val": "2",
        "--num-sft": "64",
        "--sft-steps": "1",
    }
    monkeypatch.setattr(sys, "argv", ["prepare.py", *(word for pair in sizes.items() for word in pair)])
    assert prepare.main() == 0
    assert {row["agent_name"] for row in read(tmp_path / "train.parquet")} == {"openai_agent"}
    settings = ("data.prompts_per_step=2", "data.max_response_tokens=24", "rollout.samples_per_prompt=2")
    limits = ("trainer.max_steps=1", "trainer.preflight=false", "eval.every=0", "eval.before_train=false")
    assert train("openai_agent", tmp_path, tmp_path / "run", *settings, *limits) == 0
    with RunFolder.open(tmp_path / "run", read_only=True) as run:
        rows = run.samples.read(1)
        run.ledger.check()
    assert len(rows) == 4
    for row in rows:
        assert row["agent_name"] == "openai_agent"
        assert row["agent_facts"]["model_calls"] >= 1
        start, stop = row["messages"][-1]["tokens"]
        assert 0 <= start < stop == len(row["response_ids"])


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_small_model_learns_through_the_api(
    prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--out", str(tmp_path)])
    assert prepare.main() == 0
    capsys.readouterr()
    settings = ("--json", "trainer.max_steps=20", "eval.every=0")
    assert train("openai_agent", tmp_path, tmp_path / "run", *settings) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["pass_rate_start"] < 0.3
    assert result["pass_rate_final"] >= 0.8
    calls = [
        one["model_calls/mean"]
        for one in read_metrics(tmp_path / "run" / METRICS_FILE)
        if "model_calls/mean" in one
    ]
    assert calls[0] < 1.5 < calls[-1]
