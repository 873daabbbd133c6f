"""examples/raft and examples/distillation: the files are what they say, and what their READMEs do learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.cli_calls import cli
from example_files import REPO, load_example, read

from strop.config import load_config
from strop.data.tiny_model import make_tiny_model
from strop.trainer.config import Config

RAFT = REPO / "examples" / "raft"
DISTILLATION = REPO / "examples" / "distillation"


def test_the_configurations_say_what_the_readmes_do() -> None:
    raft: Any = load_config(Config, source=RAFT / "config.yaml")
    assert (raft.algorithm.adv_estimator, raft.algorithm.keep.best, raft.algorithm.keep.min_score) == (
        "raft",
        1,
        1.0,
    )
    offline: Any = load_config(Config, source=RAFT / "sft.yaml")
    assert (offline.sft.data.keep.best, offline.sft.data.keep.min_score) == (4, 1.0)
    assert load_config(Config, source=DISTILLATION / "sft.yaml").sft.distillation.coef == 1  # type: ignore[attr-defined]


def test_the_teacher_alone_sees_answers_and_the_student_is_smaller(tmp_path: Path) -> None:
    files = load_example("distillation/prepare.py").write_all(tmp_path, seed=0, solved=6, asked=5, held_out=4)
    solved, asked, held_out = (read(file) for file in (files.sft, files.train, files.val))
    assert [len(rows) for rows in (solved, asked, held_out)] == [6, 5, 4]
    words = [row["messages"][0]["content"] for row in solved]
    words += [row["prompt"][0]["content"] for row in asked + held_out]
    assert len(set(words)) == 15
    sizes = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("teacher", "student")]
    assert sizes[0]["hidden_size"] == 2 * sizes[1]["hidden_size"]
    assert sizes[0]["vocab_size"] == sizes[1]["vocab_size"]


def done(*words: object) -> Any:
    """The last line of a command's output, which is JSON."""
    result = cli(*words, "resources.num_threads=1", "--json")
    assert result.code == 0, result.err
    return result.record


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rejection_sampling_learns_the_sums_in_turns_and_from_answers_that_are_there(tmp_path: Path) -> None:
    load_example("arithmetic/prepare.py").write_data(tmp_path, seed=0, largest=19)
    make_tiny_model(tmp_path / "model", seed=0)
    start, files = tmp_path / "start", [f"data.val_files=[{tmp_path / 'val.parquet'}]"]
    reward = f"reward.path={REPO / 'examples' / 'arithmetic' / 'reward.py'}"
    done(
        "sft", "--config", REPO / "examples" / "arithmetic" / "sft.yaml", "--out", start,
        f"model.path={tmp_path / 'model'}", f"sft.data.train_files=[{tmp_path / 'sft.parquet'}]",
    )  # fmt: skip
    common = ["--config", RAFT / "config.yaml", reward]
    before = done("eval", start, *common, *files)["pass_rate"]
    train = f"data.train_files=[{tmp_path / 'train.parquet'}]"
    run = tmp_path / "raft"
    done(
        "train", *common, *files, train, "--out", run, f"model.path={start / 'model'}", "trainer.max_steps=60"
    )
    assert done("eval", run, *common, *files)["pass_rate"] > before + 0.15
    answers = tmp_path / "answers.jsonl"
    done(
        "eval", start, *common, f"data.val_files=[{tmp_path / 'train.parquet'}]", "eval.samples_per_prompt=16",
        "eval.temperature=1.0", "--out", answers,
    )  # fmt: skip
    offline = tmp_path / "offline"
    done(
        "sft", "--config", RAFT / "sft.yaml", "--out", offline, f"model.path={start / 'model'}",
        f"sft.data.train_files=[{answers}]",
    )  # fmt: skip
    assert done("eval", offline, *common, *files)["pass_rate"] > before + 0.15


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_student_learns_the_words_from_the_logs_of_its_teacher(tmp_path: Path) -> None:
    files = load_example("distillation/prepare.py").write_all(tmp_path, seed=0)
    common = ["--config", DISTILLATION / "config.yaml"]
    fine_tuning = ["--config", DISTILLATION / "sft.yaml"]
    val = f"data.val_files=[{files.val}]"
    teacher, student, logs = tmp_path / "teach", tmp_path / "distilled", tmp_path / "logs.parquet"
    done(
        "sft", *fine_tuning, "--out", teacher, f"model.path={tmp_path / 'teacher'}",
        f"sft.data.train_files=[{files.sft}]",
        "sft.distillation.coef=0", "sft.num_epochs=6",
    )  # fmt: skip
    done(
        "generate", teacher, *common, "--prompts", files.train, "--temperature", 1, "--max-tokens", 12,
        "--top-logprobs", 16, "--out", logs,
    )  # fmt: skip
    done(
        "sft",
        *fine_tuning,
        "--out",
        student,
        f"model.path={tmp_path / 'student'}",
        f"sft.data.train_files=[{logs}]",
    )
    assert done("eval", student, *common, val)["pass_rate"] > 0.5
