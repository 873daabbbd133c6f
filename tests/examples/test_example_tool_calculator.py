"""The example with a calculator: its files fit together, and the model learns to call the tool."""

from __future__ import annotations

import json
import sys
from collections import Counter
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
    return load_example("tool_calculator/prepare.py")


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("=144000", 1.0),
        ('<tool_call>{"name": "calculator"}</tool_call>144000=144000', 1.0),
        ("=1=144000", 1.0),
        ("144000", 0.0),  # the result alone, without an answer after it
        ("=144000 ", 0.0),
        ("=144000=", 0.0),
        ("", 0.0),
    ],
)
def test_the_calculator_example_scores_what_follows_the_last_equals_sign(response: str, score: float) -> None:
    found = load_example("tool_calculator/reward.py").compute_score("tool_calculator", response, "144000", {})
    assert (found["score"], found["acc"]) == (score, bool(score))


def test_transcripts_of_the_calculator_example_have_the_stated_shares(
    prepare: ModuleType, tmp_path: Path
) -> None:
    prepare.write_data(tmp_path, seed=3, num_train=20, num_val=10, num_sft=1000)
    train_rows, val, sft = (read(tmp_path / f"{name}.parquet") for name in ("train", "val", "sft"))
    asked = [row["prompt"][0]["content"] for row in (*train_rows, *val, *sft)]
    assert (len(train_rows), len(val), len(sft)) == (20, 10, 1000)
    assert len(set(asked)) == 1030
    for row in (*train_rows, *val):
        a, b = row["prompt"][0]["content"].split("*")
        assert row["reward_model"]["ground_truth"] == str(int(a) * int(b))
        assert len(row["reward_model"]["ground_truth"]) == 6
    kinds = Counter((len(row["prompt"]), len(row["completion"])) for row in sft)
    assert set(kinds) == {(3, 1), (1, 3), (1, 1)}
    # Binomial, n = 1000: five standard deviations of a share of 0.35 are 0.075, of 0.12 0.051.
    assert kinds[3, 1] / 1000 == pytest.approx(0.35, abs=0.075)
    assert kinds[1, 3] / 1000 == pytest.approx(0.12, abs=0.051)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_one_step_of_the_calculator_example_plays_agent_episodes(
    prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "--out",
        str(tmp_path),
        "--num-train",
        "8",
        "--num-val",
        "2",
        "--num-sft",
        "64",
        "--sft-steps",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", ["prepare.py", *words])
    assert prepare.main() == 0
    settings = ("data.prompts_per_step=2", "data.max_response_tokens=24", "rollout.samples_per_prompt=2")
    code = train(
        "tool_calculator",
        tmp_path,
        tmp_path / "run",
        *settings,
        "trainer.max_steps=1",
        "trainer.preflight=false",
    )
    assert code == 0
    with RunFolder.open(tmp_path / "run", read_only=True) as run:
        rows = run.samples.read(1)
    assert len(rows) == 4
    for row in rows:
        assert row["agent_name"] == "tool_agent"
        assert "tool_call_counts" in row["agent_facts"]
        assert row["messages"][0]["role"] == "assistant"
        start, stop = row["messages"][-1]["tokens"]
        assert 0 <= start < stop == len(row["response_ids"])


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_small_model_learns_to_call_the_calculator(
    prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--out", str(tmp_path)])
    assert prepare.main() == 0
    capsys.readouterr()
    assert (
        train("tool_calculator", tmp_path, tmp_path / "run", "--json", "trainer.max_steps=20", "eval.every=0")
        == 0
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["pass_rate_start"] < 0.3
    assert result["pass_rate_final"] >= 0.8
    metrics = read_metrics(tmp_path / "run" / METRICS_FILE)
    calls = [step["tool_call_counts/mean"] for step in metrics if "tool_call_counts/mean" in step]
    assert calls[0] < 0.5
    assert calls[-1] > 0.7
