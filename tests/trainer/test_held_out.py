"""A validation on rows that are trained on is said before the run, and only then."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from trainer.image_task import ImageTask, image_rows
from trainer.preference.preference_task import Task
from trainer.tiny_runs import Project, train_in

from strop.data.preference_config import PreferDataConfig
from strop.data.preference_rows import PreferenceDataset
from strop.data.readers import read_rows
from strop.engines.config import ModelConfig
from strop.engines.tokenizer import load_tokenizer
from strop.evaluation.evaluate import evaluate
from strop.trainer.config import Config
from strop.trainer.preference.trainer import train_on_preferences
from strop.trainer.preflight.trial import run_preflight
from strop.trainer.setup import load_training_data
from strop.trainer.sft.trainer import fine_tune
from strop.trainer.start import start_run
from strop.utils.verdict import Check


def warning(config: Config) -> Check | None:
    return load_training_data(config).held_out


def text(config: Config) -> str:
    check = warning(config)
    assert check is not None
    assert check.level == "warn"
    return check.text


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def jsonl(project: Project) -> list[dict[str, Any]]:
    return json.loads(json.dumps(read_rows([project.task.train])))


def with_val(project: Project, val: Path | str, *overrides: str) -> Config:
    return project.config(f"data.val_files=['{val}']", *overrides)


def test_rows_of_their_own_are_no_reason_to_warn(project: Project) -> None:
    assert warning(project.config()) is None
    assert warning(project.config("data.val_files=[]")) is None


def test_validation_rows_that_are_not_asked_are_counted(project: Project, tmp_path: Path) -> None:
    rows = jsonl(project)[:5]
    rows[1]["prompt"] = rows[3]["prompt"] = "x" * 200
    val = write(tmp_path / "val.jsonl", rows)
    config = with_val(project, val, "data.max_prompt_tokens=60", "data.max_val_prompts=2")
    losses = (
        "; dropped 2 (40.0 %) longer than data.max_prompt_tokens=60; 1 left out by data.max_val_prompts=2"
    )
    assert f"val: 2 prompts{losses}" in load_training_data(config).report()
    lines: list[str] = []
    evaluate(config, say=lines.append)
    assert any(line.startswith("2 prompts x ") and line.endswith(losses) for line in lines)
    cut = ["data.filter_overlong_prompts=false", "data.truncation=left"]
    config = with_val(project, val, "data.max_prompt_tokens=60", *cut)
    expected = "val: 5 prompts; cut 2 (40.0 %) on the left to data.max_prompt_tokens=60"
    assert expected in load_training_data(config).report()


def test_one_file_for_both_is_said_once_before_a_run_and_in_a_check(project: Project, tmp_path: Path) -> None:
    config = with_val(project, project.task.train, "trainer.max_steps=1")
    num_rows = len(read_rows([project.task.train]))
    sentence = (
        f"{num_rows} of the {num_rows} rows of data.val_files are also in data.train_files ({project.task.train} is in "
        f"both)"
    )
    lines = [line for line in train_in(tmp_path / "run", config).said if "data.val_files" in line]
    assert lines == [
        f"WARNING: {sentence}: a validation on what is trained shows what was memorized; give data.val_files other rows"
    ]
    first = run_preflight(config, num_prompts=1).checks[0]
    assert (first.name, first.level, first.text) == ("validation", "warn", sentence)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", ["symlink", "hard link", "relative", "in a linked folder"])
def test_two_paths_of_one_file_are_one(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, streams: bool
) -> None:
    train = Path(shutil.copy(project.task.train, tmp_path / "train.parquet"))
    val: Path | str = tmp_path / "val.parquet"
    if kind == "symlink":
        Path(val).symlink_to(train)
    elif kind == "hard link":
        os.link(train, val)
    elif kind == "relative":
        monkeypatch.chdir(tmp_path)
        val = "train.parquet"
    else:
        (tmp_path / "link").symlink_to(tmp_path)
        val = tmp_path / "link" / "train.parquet"
    config = with_val(
        project, val, f"data.train_files=['{train}']", *(["data.streaming=true"] if streams else [])
    )
    assert f"{val} is in both" in text(config)


def test_copied_rows_are_found_whatever_their_split_and_number(project: Project, tmp_path: Path) -> None:
    rows = jsonl(project)
    copied = [
        {**row, "extra_info": {**row["extra_info"], "split": "test", "index": 100 + number}}
        for number, row in enumerate(rows[:2])
    ]
    other = [{**rows[2], "prompt": [{"role": "user", "content": "something else"}]}]
    answered = [{**rows[3], "reward_model": {**rows[3]["reward_model"], "ground_truth": "another answer"}}]
    val = write(tmp_path / "val.jsonl", [*copied, *other, *answered])
    assert text(with_val(project, val)) == "2 of the 4 rows of data.val_files are also in data.train_files"


def test_rows_that_differ_in_what_an_environment_is_given_are_different(
    project: Project, tmp_path: Path
) -> None:
    rows = [
        {**jsonl(project)[0], "extra_info": {"split": split, "index": 0, "seed": seed}}
        for split, seed in (("train", 1), ("test", 2))
    ]
    train, val = write(tmp_path / "train.jsonl", rows[:1]), write(tmp_path / "val.jsonl", rows[1:])
    assert warning(with_val(project, val, f"data.train_files=['{train}']")) is None


@pytest.mark.parametrize(
    ("in_train", "in_val"),
    [
        ({"id": 1}, {"id": 2}),
        ({"split": "train", "index": 0}, {"split": "test", "index": 7}),
        ({"extra_info": {"a": 1, "b": {"c": 2, "d": 3}}}, {"extra_info": {"b": {"d": 3, "c": 2}, "a": 1}}),
        ({}, {"note": None, "extra_info": {"note": None}}),
        ({"extra_info": {"truth": [7]}}, {"extra_info": {"truth": [7.0]}}),
    ],
)
def test_a_row_of_another_form_is_the_same(
    project: Project, tmp_path: Path, in_train: dict[str, Any], in_val: dict[str, Any]
) -> None:
    row = {**jsonl(project)[0], "extra_info": {}}
    train = write(tmp_path / "train.jsonl", [{**row, **in_train}])
    val = write(tmp_path / "val.jsonl", [{**row, **in_val}])
    config = with_val(project, val, f"data.train_files=['{train}']")
    assert text(config) == "1 of the 1 rows of data.val_files are also in data.train_files"


@pytest.mark.parametrize("is_inner_trained", [False, True])
def test_a_file_of_a_folder_is_found_where_rows_are_streamed(
    project: Project, tmp_path: Path, is_inner_trained: bool
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    inner = write(folder / "some.jsonl", jsonl(project))
    train, val = (inner, folder) if is_inner_trained else (folder, inner)
    config = with_val(project, val, f"data.train_files=['{train}']", "data.streaming=true")
    assert text(config) == f"data.val_files and data.train_files have rows in common: {val} is in both"


def test_rows_without_images_are_compared_beside_others(tmp_path: Path) -> None:
    task = ImageTask(tmp_path)
    words = [{**row, "images": [], "prompt": [{"role": "user", "content": "?"}]} for row in image_rows(1)]
    for name in ("train", "val"):
        table = pyarrow.Table.from_pylist(words + image_rows(4, seed=len(name)))
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    assert text(task.config()) == (
        "1 of the 1 rows without images of data.val_files are also in data.train_files"
    )
    one_file = task.config(f"data.val_files=['{tmp_path / 'train.parquet'}']")
    assert "1 of the 1 rows without images" in text(one_file)
    assert "train.parquet is in both" in text(one_file)


def test_comparisons_differ_in_either_answer(tiny_model: Path) -> None:
    pairs = [("a", "b"), ("a", "c"), ("b", "a"), ("a", "b")]
    rows = [{"prompt": "x", "chosen": better, "rejected": worse} for better, worse in pairs]
    config = PreferDataConfig(max_tokens=48)
    found = PreferenceDataset(rows, load_tokenizer(ModelConfig(path=str(tiny_model))), config, loss="sigmoid")
    first, *others = map(found.identity, range(4))
    assert [other == first for other in others] == [False, False, True]


def test_training_rows_that_are_left_out_do_not_count(project: Project, tmp_path: Path) -> None:
    rows = jsonl(project)
    val = write(tmp_path / "val.jsonl", rows[1:2])
    assert warning(with_val(project, val, "data.max_train_prompts=1")) is None


def test_fine_tuning_says_it_too(project: Project, tmp_path: Path) -> None:
    rows = json.loads(json.dumps(read_rows([project.task.sft])))
    train, val = write(tmp_path / "train.jsonl", rows[:-1]), write(tmp_path / "val.jsonl", rows[-2:])
    config = project.config(
        f"sft.data.train_files=['{train}']", f"sft.data.val_files=['{val}']", "sft.max_steps=1"
    )
    said: list[str] = []
    start = start_run(tmp_path / "run", config, command=["strop", "sft"])
    with start.run:
        fine_tune(config, start.run, say=said.append)
    (line,) = [line for line in said if "WARNING" in line]
    assert line == (
        "WARNING: 1 of the 2 rows of sft.data.val_files are also in sft.data.train_files: a validation on what is "
        "trained shows what was memorized; give sft.data.val_files other rows"
    )


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_training_on_preferences_says_it_too(tiny_model: Path, tmp_path: Path, loss: str) -> None:
    config = Task(tmp_path, tiny_model).config(loss, "prefer.max_steps=1")
    said: list[str] = []
    start = start_run(tmp_path / "run", config, command=["strop", "prefer"])
    with start.run:
        train_on_preferences(config, start.run, say=said.append)
    (line,) = [line for line in said if "WARNING" in line]
    assert "24 of the 24 rows of prefer.data.val_files are also in prefer.data.train_files (" in line
