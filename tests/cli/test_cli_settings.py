"""Settings of the command line: what a command does not read is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_calls import Project, cli

from strop.cli.unread import READS
from strop.config import to_flat_dict
from strop.sft import command as sft
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
        ("generate", "model.path=other", "does not read model.path; set MODEL_OR_RUN"),
        ("score", "rollout.temperature=0.5", "`strop score` does not read rollout.temperature; leave it out"),
        ("score", "reward.weight=2", "`strop score` does not read reward.weight"),
        ("data check", "data.sampler=in_order", "`strop data check` does not read data.sampler"),
        ("data check", "rollout.top_k=4", "`strop data check` does not read rollout.top_k"),
        ("data cache", "data.max_prompt_tokens=4", "reads data.cache_dir, data.cache_max_bytes alone"),
        ("doctor", "resources.call_timeout_s=5", "`strop doctor` does not read resources.call_timeout_s"),
        ("doctor", "trainer.seed=1", "`strop doctor` does not read trainer.seed; leave it out"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(
    project: Project, tmp_path: Path, command: str, setting: str, sentence: str
) -> None:
    run = ["--out", tmp_path / "run"]
    where = {"sft": run, "train": run, "score": ["builtin", project.data("train")]}
    where |= {name: [project.model] for name in ("eval", "generate")}
    result = cli(*command.split(), *where.get(command, []), "--config", project.config, setting)
    assert sentence in result.sentence
    assert not (tmp_path / "run").exists()


def test_an_export_takes_no_settings(trained: Path, tmp_path: Path) -> None:
    result = cli("export", trained, "--out", tmp_path / "model", "model.dtype=float32")
    assert "`strop export` does not read model.dtype; leave it out" in result.sentence
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    "setting", ["eval={temperature: 1.0, top_p: 0.9, top_k: 5}", "data.max_response_tokens=9000"]
)
def test_what_an_answer_depends_on_is_read(project: Project, setting: str) -> None:
    budget = "actor.engine.max_tokens_per_device=10000"
    for command in ("eval", "generate"):
        result = cli(
            command, project.model, "--config", project.config, setting, budget, "data.prompt_key=''"
        )
        assert "data.prompt_key is ''" in result.sentence


def test_what_commands_are_said_to_read_are_keys() -> None:
    known = to_flat_dict(Config())
    told = (*READS.values(), sft.READS)
    named = [key for reads in told for key in (*reads.keys, *reads.but, *reads.instead) if key]
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
