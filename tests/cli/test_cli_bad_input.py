"""Bad input ends `strop train` before it trains, with one sentence that says what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_calls import Project, Result, cli


def train(project: Project, tmp_path: Path, *words: str) -> Result:
    """A training that must not start."""
    out = tmp_path / "run"
    result = cli("train", "--config", project.config, "--out", out, *words)
    assert not out.exists(), "nothing was trained, so nothing is left"
    return result


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data.train_files=[nowhere.parquet]"], "data file nowhere.parquet does not exist"),
        (["data.train_files=[]"], "data.train_files is empty; name at least one"),
        (["data.prompt_key=question"], "map it with data.prompt_key); columns found: data_source, prompt,"),
        (["data.max_prompt_tokens=3"], "the shortest has 16 tokens, so raise it to at least 16"),
        (
            ["data.max_prompt_tokens=3", "data.filter_overlong_prompts=false"],
            "raise that to 16 to keep all rows",
        ),
        (["rollout.samples_per_prompt=1"], "set rollout.samples_per_prompt to at least 2"),
        (
            ["rollout.temperatur=1"],
            "unknown key rollout.temperatur; the nearest valid key is rollout.temperature",
        ),
        (["rollout.top_k=many"], "rollout.top_k is 'many', but it needs a whole number"),
        (["trainer.trackers=[paper]"], "unknown tracker 'paper'; known: clearml, comet, console"),
        (["reward.path=nowhere.py"], "reward.path is 'nowhere.py'"),
    ],
)
def test_settings_and_data(project: Project, tmp_path: Path, words: list[str], expected: str) -> None:
    assert expected in train(project, tmp_path, *words).sentence


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def other(): pass", "has no function 'compute_score': it defines other"),
        ("raise RuntimeError('at import')", "RuntimeError: at import"),
        ("def compute_score(**kwargs): raise KeyError('x')", "raised KeyError: 'x' at reward.py:1"),
        ("def compute_score(**kwargs): return float('nan')", "returned nan; return a finite number"),
        ("def compute_score(**kwargs): return 'good'", "returned the str"),
        ("def compute_score(**kwargs): return None", "returned None"),
        ("def compute_score(**kwargs):\n while True: pass", "did not finish in 0.3 s (reward.timeout_s)"),
    ],
)
def test_reward_functions(project: Project, tmp_path: Path, source: str, expected: str) -> None:
    path = tmp_path / "reward.py"
    path.write_text(source)
    result = train(project, tmp_path, f"reward.path={path}", "reward.timeout_s=0.3")
    assert expected in result.sentence


def test_a_tokenizer_without_chat_template(project: Project, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(project.model, model)
    (model / "chat_template.jinja").unlink()
    assert "has no chat template" in train(project, tmp_path, f"model.path={model}").sentence


def test_broken_rows(project: Project, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "reverse: ab"}) + "\n{oh\n")
    expected = f"line 2 of {rows} is not valid JSON"
    assert expected in train(project, tmp_path, f"data.train_files=[{rows}]").sentence


def test_an_unknown_configuration_file(tmp_path: Path) -> None:
    result = cli("train", "--config", tmp_path / "none.yaml")
    assert "none.yaml does not exist; give a YAML file, or the name of a preset" in result.sentence
