"""`strop dpo`, `strop reward-model` and `strop prefer` as commands."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.cli_calls import cli
from preference_task import Task


def words(task: Task, folder: Path) -> list[str]:
    return [
        "--out", str(folder), f"model.path={task.model}", f"prefer.data.train_files=[{task.pairs}]",
        f"prefer.data.val_files=[{task.pairs}]", "prefer.data.max_tokens=48", "prefer.examples_per_update=8",
        "prefer.num_epochs=2", "prefer.optim.lr=3e-3", "trainer.trackers=[jsonl]", "resources.num_threads=1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "extra"),
    [("dpo", []), pytest.param("dpo", ["prefer.loss=orpo"], marks=pytest.mark.slow), ("reward-model", [])],
)
def test_accuracy_on_held_out_comparisons_rises(
    task: Task, tmp_path: Path, command: str, extra: list[str]
) -> None:
    result = cli(command, *words(task, tmp_path / "run"), *extra, "--json")
    assert result.code == 0, result.err
    record = result.record
    assert record["steps"] == 6
    if not extra:
        assert record["accuracy_start"] == 0.5, "every comparison is a tie"
    assert record["accuracy_final"] > max(0.8, record["accuracy_start"])
    assert (Path(record["model"]) / "config.json").is_file()
    again = cli(command, "--resume", tmp_path / "run", "--json")
    assert again.record == record
    assert cli("prefer", "--resume", tmp_path / "run", "--json").record == record
    refused = cli("train", "--resume", tmp_path / "run").sentence
    assert f"is a run of `strop {command}`; continue it with that command" in refused
    text = cli(command, "--resume", tmp_path / "run").out
    assert "held-out comparisons made as the rows do" in text


def test_a_command_keeps_to_its_losses_and_leaves_no_folder(task: Task, tmp_path: Path) -> None:
    wrong = cli("dpo", *words(task, tmp_path / "run"), "prefer.loss=reward").sentence
    assert "prefer.loss is reward, but this command is for sigmoid" in wrong
    wrong = cli("reward-model", *words(task, tmp_path / "run"), "prefer.loss=ipo").sentence
    assert "prefer.loss is ipo, but this command is for reward" in wrong
    assert not (tmp_path / "run").exists()


def test_without_held_out_rows_there_is_no_accuracy(task: Task, tmp_path: Path) -> None:
    record = cli("dpo", *words(task, tmp_path / "run"), "prefer.data.val_files=[]", "--json").record
    assert (record["accuracy_start"], record["accuracy_final"], record["val_loss"]) == (None, None, None)
