"""Settings of the command line: what a command does not read is refused before anything is loaded."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
from cli_calls import Project, cli

import strop
from strop.cli.commands import eval as eval_command
from strop.cli.main import COMMANDS
from strop.cli.unused_keys import OF_TRAINING, Reads, reads_which_model, refuse_unread_overrides
from strop.config import to_flat_dict
from strop.config.schema import tree
from strop.trainer.config import Config
from strop.utils.terminal import UsageError


def test_an_evaluation_whose_command_names_no_model_reads_which_one_from_the_settings() -> None:
    reads = eval_command.READS
    assert not reads.covers("model.path")
    assert reads_which_model(reads).covers("model.path")
    assert not reads_which_model(reads).covers("data.train_files")


@pytest.mark.parametrize(
    ("command", "setting", "sentence"),
    [
        ("sft", "data.sampler=in_order", "of data, `strop sft` reads data.cache_dir alone; leave it out"),
        ("sft", "agent.timeout_s=3", "`strop sft` does not read agent.timeout_s; leave it out, or put it"),
        ("sft", "eval={every: 2, temperature: 1.0}", "reads eval.every, eval.before_train alone"),
        ("sft", "algorithm=ppo", "of algorithm, `strop sft` reads algorithm.extensions alone"),
        ("train", "sft.num_epochs=2", "`strop train` does not read sft.num_epochs; leave it out, or put it"),
        ("eval", "resources.ranks=2", "resources.runtime=inline is one process"),
        ("eval", "resources.offload_idle=true", "of resources, `strop eval` reads resources.device"),
        ("eval", "resources={runtime: ray, apart: {rollout: 2}}", "resources.apart; set resources.ranks"),
        ("check", "run.save_every=3", "`strop check` does not read run.save_every"),
        ("check", "sft.num_epochs=3", "`strop check` does not read sft.num_epochs"),
        (
            "serve",
            "resources.runtime=ray",
            "`strop serve` is one process, so it does not read resources.runtime",
        ),
        (
            "sandbox check",
            "reward.num_workers=2",
            "of reward, `strop sandbox check` reads reward.sandbox alone",
        ),
        ("serve", "eval.temperature=1", "`strop serve` does not read eval.temperature"),
        ("eval", "rollout.temperature=0.5", "does not read rollout.temperature; set eval.temperature"),
        ("eval", "data.max_train_prompts=5", "set data.max_val_prompts"),
        ("eval", "trainer.max_steps=5", "of trainer, `strop eval` reads trainer.seed alone"),
        ("generate", "resources.apart={rollout: 2}", "resources.runtime=inline is one process"),
        ("generate", "resources.call_timeout_s=5", "`strop generate` is one process, so it does not read"),
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
    where |= {name: [project.model] for name in ("eval", "generate", "serve")}
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


def test_what_a_file_says_to_other_commands_is_left_alone_and_named_once(
    project: Project, tmp_path: Path
) -> None:
    result = cli("generate", project.model, "--config", project.config, "data.prompt_key=''")
    assert "data.prompt_key is ''" in result.sentence  # the first thing wrong is no setting of others
    file = tmp_path / "own.yaml"
    file.write_text(project.config.read_text().replace("run: {save_every: 1}", "actor: {optim: {lr: 0.01}}"))
    questions = tmp_path / "questions.txt"
    questions.write_text("1+1=\n")
    settings = ["rollout.timeout_s=50", "data.max_response_tokens=2"]
    result = cli("generate", project.model, "--config", file, "--prompts", questions, *settings)
    assert result.code == 0
    (line,) = [line for line in result.err.splitlines() if "does not read" in line]
    of_data = "data.max_prompt_tokens, data.prompts_per_step, data.train_files, data.val_files"
    assert line == (
        f"`strop generate` does not read actor.optim.lr, {of_data}, model.path, reward, rollout.samples_per_prompt, "
        f"sft, trainer of {file}"
    )


def test_a_continued_run_refuses_what_its_command_does_not_read(project: Project, tmp_path: Path) -> None:
    run = tmp_path / "sft"
    assert cli("sft", "--config", project.config, "--out", run, "sft.max_steps=1").code == 0
    result = cli("sft", "--resume", run, "reward.num_workers=2")
    assert "`strop sft` does not read reward.num_workers; leave it out" in result.sentence


def reads_of_commands() -> dict[str, Reads]:
    """What each command reads, by its name; they say it in their modules."""
    modules = {word: importlib.import_module(one.module) for word, one in COMMANDS.items() if word != "train"}
    return {
        "train": OF_TRAINING,
        **{
            word: module.READS
            for word, module in modules.items()
            if isinstance(getattr(module, "READS", None), Reads)
        },
    }


def test_each_command_uses_or_refuses_each_key() -> None:
    told = reads_of_commands()
    assert {"train", "eval", "score", "sft", "prefer", "serve", "sandbox", "doctor"} <= told.keys()
    for command, reads in told.items():
        for key in to_flat_dict(Config()):
            if reads.covers(key):
                refuse_unread_overrides([f"{key}=1"], command, reads)
            else:
                with pytest.raises(UsageError, match=rf"would do nothing: .*`strop {command}`"):
                    refuse_unread_overrides([f"{key}=1"], command, reads)


def test_each_command_with_settings_says_what_it_reads() -> None:
    for name, command in COMMANDS.items():
        tree = ast.parse(Path(importlib.import_module(command.module).__file__ or "").read_text())
        called = {
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        if called & {"load_settings", "add_run_arguments"}:
            assert called & {"refuse_unread", "refuse_unread_overrides", "begin"}, name


def test_every_key_has_a_reader() -> None:
    texts = {path: path.read_text() for path in Path(strop.__file__).parent.rglob("*.py")}
    for key in tree(Config).values():
        if key.is_section:
            continue  # its settings follow
        name, home = key.key.rpartition(".")[2], Path(inspect.getfile(key.owner))
        used = any(
            re.search(rf'{"(?<!self)" if path == home else ""}\.{name}\b|\["{name}"\]', text)
            for path, text in texts.items()
            if name in text
        )
        assert used, f"no module reads {key.key}"


def test_what_commands_are_said_to_read_are_keys() -> None:
    known = to_flat_dict(Config())
    named = [
        key
        for reads in reads_of_commands().values()
        for key in (*reads.keys, *reads.but, *reads.instead)
        if key
    ]
    assert [key for key in named if not any(one == key or one.startswith(f"{key}.") for one in known)] == []


def test_an_unknown_tracker_is_said_before_data_and_model_are_read(project: Project, tmp_path: Path) -> None:
    settings = ["trainer.trackers=[wandbb]", "data.train_files=[no-such-file.parquet]"]
    result = cli("train", "--config", project.config, "--out", tmp_path / "run", *settings)
    assert (
        "unknown tracker 'wandbb'; known: clearml, comet, console, jsonl, mlflow, swanlab, tensorboard"
        in result.sentence
    )


def test_the_tracker_of_the_documentation_takes_the_metrics(project: Project, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text()
    start = page.index("from strop.observability.trackers.setup import trackers")
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


@pytest.mark.slow
def test_ranks_give_the_answers_of_one_process(project: Project, tmp_path: Path) -> None:
    asked = ["--config", project.config, "eval.temperature=1.0", "eval.samples_per_prompt=3", "--json"]
    one = cli("eval", project.model, *asked, "--out", tmp_path / "one.jsonl")
    ranks = ["resources.runtime=ray", "resources.ranks=3", "resources.cpus_per_rank=0.5"]
    three = cli("eval", project.model, *asked, *ranks, "--out", tmp_path / "three.jsonl")
    assert (one.code, three.code) == (0, 0), three.err
    assert "3 processes, each with the whole model" in three.err
    assert (tmp_path / "three.jsonl").read_text() == (tmp_path / "one.jsonl").read_text()
    records = [
        {name: value for name, value in one.record.items() if name != "seconds"} for one in (one, three)
    ]
    assert records[0] == records[1]
    assert records[0]["num_answers"] == 12


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--config-name=mine", "a file of settings is given with --config FILE"),
        ("--multirun", "several runs are `strop sweep`"),
        ("--trainer.seed=1", "settings are given as key=value, without dashes"),
    ],
)
def test_an_option_of_hydra_is_answered_with_what_there_is(option: str, sentence: str) -> None:
    assert sentence in cli("train", option).sentence
