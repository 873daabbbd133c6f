"""Settings of the command line: what a command does not read is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_calls import Project, cli

from strop.cli.unread import READS
from strop.config import to_flat_dict
from strop.trainer.config import Config


@pytest.mark.parametrize(
    ("command", "setting", "sentence"),
    [
        ("sft", "data.sampler=in_order", "of data, `strop sft` reads data.cache_dir alone; leave it out"),
        ("sft", "agent.timeout_s=3", "`strop sft` does not read agent.timeout_s; leave it out, or put it"),
        ("sft", "eval={every: 2, temperature: 1.0}", "reads eval.every, eval.before_train alone"),
        ("sft", "algorithm=ppo", "of algorithm, `strop sft` reads algorithm.extensions alone"),
        ("train", "sft.num_epochs=2", "`strop train` does not read sft.num_epochs; leave it out, or put it"),
        ("eval", "resources.ranks=2", "resources.runtime=inline is one process"),
        ("eval", "resources.runtime=ray", "reads resources.device, resources.num_threads alone"),
        ("eval", "rollout.temperature=0.5", "does not read rollout.temperature; set eval.temperature"),
        ("eval", "data.max_train_prompts=5", "set data.max_val_prompts"),
        ("eval", "trainer.max_steps=5", "of trainer, `strop eval` reads trainer.seed alone"),
        ("generate", "resources.apart={rollout: 2}", "resources.runtime=inline is one process"),
        ("generate", "resources.call_timeout_s=5", "reads resources.device, resources.num_threads alone"),
        ("generate", "rollout.top_p=0.5", "set --top-p"),
        ("generate", "reward.num_workers=2", "`strop generate` does not read reward.num_workers"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(
    project: Project, tmp_path: Path, command: str, setting: str, sentence: str
) -> None:
    where = ["--out", tmp_path / "run"] if command in ("sft", "train") else [project.model]
    result = cli(command, *where, "--config", project.config, setting)
    assert sentence in result.sentence
    assert not (tmp_path / "run").exists()


def test_what_commands_are_said_to_read_are_keys() -> None:
    known = to_flat_dict(Config())
    named = [key for reads in READS.values() for key in (*reads.keys, *reads.but, *reads.instead) if key]
    assert [key for key in named if not any(one == key or one.startswith(f"{key}.") for one in known)] == []


def test_an_unknown_tracker_is_said_before_data_and_model_are_read(project: Project, tmp_path: Path) -> None:
    settings = ["trainer.trackers=[wandbb]", "data.train_files=[no-such-file.parquet]"]
    result = cli("train", "--config", project.config, "--out", tmp_path / "run", *settings)
    assert "unknown tracker 'wandbb'; known: console, jsonl, tensorboard" in result.sentence


def test_the_tracker_of_the_documentation_takes_the_metrics(project: Project, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text()
    start = page.index("from strop.trainer.trackers import trackers")
    (tmp_path / "lines.py").write_text(page[start : page.index("```", start)])
    settings = [
        "trainer.max_steps=1", "trainer.trackers=[jsonl,lines]", f"algorithm.extensions=['{tmp_path / 'lines.py'}']",
    ]  # fmt: skip
    result = cli("train", "--config", project.config, "--out", tmp_path / "run", *settings)
    assert result.code == 0
    assert "is switched off" not in result.err, result.err
    lines = (tmp_path / "run" / "lines.txt").read_text().splitlines()
    assert lines[0] == "0 None"
    assert any(float(line.removeprefix("1 ")) > 0 for line in lines if line.startswith("1 0."))
