"""Bad input ends `strop train` before it trains, with one sentence that says what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
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
        (["data.train_files=[]"], "data.train_files (a list of .parquet or .jsonl files) is not set"),
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


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("train", "as in `strop train model.path=models/smollm2 'data.train_files=[train.parquet]'"),
        ("sft", "as in `strop sft model.path=models/smollm2 'sft.data.train_files=[chats.jsonl]'"),
        ("prefer", "as in `strop prefer model.path=models/sft 'prefer.data.train_files=[pairs.jsonl]'"),
        ("dpo", "as in `strop dpo model.path=models/sft 'prefer.data.train_files=[pairs.jsonl]'"),
        ("reward-model", "as in `strop reward-model model.path=models/sft 'prefer.data.train_files="),
        ("eval", "name MODEL_OR_RUN, as in `strop eval runs/arithmetic`"),
        ("generate", "name MODEL_OR_RUN, as in `strop generate runs/arithmetic`"),
        ("serve", "required: MODEL_OR_RUN, as in `strop serve runs/arithmetic`"),
        ("export", "required: RUN, OUT, as in `strop export runs/arithmetic --out models/arithmetic`"),
        ("score", "required: REWARD, SAMPLES, as in `strop score reward.py runs/arithmetic`"),
        ("diff", "required: RUN_A, RUN_B, as in `strop diff "),
    ],
)
def test_a_command_alone_says_what_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in cli(command).sentence
    assert list(tmp_path.iterdir()) == [], "no folder is made"


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        ("train", ""),
        pytest.param("sft", "sft.", marks=pytest.mark.slow),
        pytest.param("prefer", "prefer.", marks=pytest.mark.slow),
    ],
)
def test_what_is_missing_is_said_without_loading_torch(tmp_path: Path, kind: str, prefix: str) -> None:
    code = (
        "import sys; from strop.cli.main import main; "
        f"code = main(['{kind}', 'model.path=somewhere']); print(code, 'torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.split() == ["2", "False"]
    assert (
        f"strop {kind}: {prefix}data.train_files (a list of .parquet or .jsonl files) is not set"
        in run.stderr
    )
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_is_not_there_is_said_before_torch_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from strop.cli.main import main; "
        "code = main(['train', 'trainer.trackers=[wandB]']); print(code, 'torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.split() == ["2", "False"]
    assert "unknown tracker 'wandB'" in run.stderr
    assert "Did you mean wandb?" in run.stderr


def test_a_stop_token_that_the_model_has_not_is_refused(project: Project, tmp_path: Path) -> None:
    sentence = train(project, tmp_path, "rollout.stop_token_ids=[99999]").sentence
    assert "rollout.stop_token_ids has 99999, but the model in" in sentence


@pytest.mark.parametrize(
    ("command", "setting", "other"),
    [
        ("sft", "actor.optim.lr=1e-5", "sft.optim.lr"),
        ("sft", "data.train_files=[a.jsonl]", "sft.data.train_files"),
        ("sft", "trainer.num_epochs=2", "sft.num_epochs"),
        ("dpo", "actor.optim.lr=1e-5", "prefer.optim.lr"),
        ("reward-model", "trainer.max_steps=2", "prefer.max_steps"),
    ],
)
def test_a_setting_of_training_is_answered_with_that_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, setting: str, other: str
) -> None:
    monkeypatch.chdir(tmp_path)
    key = setting.partition("=")[0]
    assert cli(command, setting).sentence.endswith(f"`strop {command}` does not read {key}; set {other}")


@pytest.mark.parametrize(
    ("variable", "launcher"),
    [
        ("TORCHELASTIC_RUN_ID", "torchrun or accelerate"),
        pytest.param("CROSS_SIZE", "deepspeed", marks=pytest.mark.slow),
    ],
)
def test_one_of_several_processes_of_a_launcher_is_refused(
    project: Project,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    launcher: str,
) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = tmp_path / "run"
    for words in (
        ["train", "--config", project.config, "--out", run],
        ["sft", "--config", project.config, "--out", run],
        ["train", "--resume", trained, "trainer.max_steps=3"],
    ):
        sentence = cli(*words).sentence
        assert f"this is one of 2 processes that {launcher} has started" in sentence
        assert "resources.runtime=ray resources.ranks=2" in sentence
    assert not run.exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cli("train", "--config", project.config, "--out", run).code == 0
