"""`strop train` and `strop sft`: results, resume, and folders that are left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_calls import Project, cli, interrupted_after

from strop.cli.quickstart.stages import _sft
from strop.config import load_config, read_config
from strop.run import RunError, RunFolder
from strop.trainer.checkpointing import Checkpointer
from strop.trainer.config import Config
from strop.trainer.untrusted_runs.own import record


def test_train_writes_its_settings_and_links_its_model(project: Project, trained: Path) -> None:
    assert read_config(Config, trained / "config.yaml") == load_config(Config, source=project.config)
    assert (trained / "model").resolve() == (trained / "checkpoints" / "global_step_2" / "model").resolve()
    assert (trained / "model" / "config.json").is_file()
    with RunFolder.open(trained, read_only=True) as run:
        assert run.info["command"][:3] == ["strop", "train", "--config"]


def test_the_last_line_of_train_is_json(project: Project, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = cli("train", "--json", "--config", project.config, "trainer.max_steps=1", "--out", run)
    assert result.code == 0
    assert len(result.out.splitlines()) == 1
    assert result.record.pop("seconds") > 0
    record = {key: value for key, value in result.record.items() if key != "seconds"}
    assert record == {
        "run": str(run),
        "steps": 1,
        "pass_rate_start": 0.0,
        "pass_rate_final": 0.0,
        "best_step": 1,
    }
    assert "loading weights" not in result.err.lower(), "progress bars of libraries stay away"


@pytest.mark.slow
def test_train_names_the_best_checkpoint_where_it_is_not_the_last(project: Project, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "reward.py").write_text(
        "from pathlib import Path\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    saved = Path({str(run)!r}, 'checkpoints')\n"
        "    one, two = [(saved / f'global_step_{step}').exists() for step in (1, 2)]\n"
        "    return {'score': 0.5, 'acc': one and not two}\n"
    )
    words = [
        f"reward.path={tmp_path / 'reward.py'}",
        "eval.every=1",
        "eval.before_train=false",
        "trainer.max_steps=3",
    ]
    words += ["run.keep_last=3"]
    result = cli("train", "--config", project.config, *words, "--out", run)
    assert result.code == 0, result.err
    assert (
        f"best:       step 2, pass rate 100.0 % (checkpoints/global_step_2): strop eval {run} --step best"
        in (result.out)
    )
    assert "step 2: validation pass rate 100.0 % (95 % interval 51.0 to 100.0) on 4 answers" in result.err
    assert "validation: pass rate 0.0 % (95 % interval 0.0 to 49.0)" in result.out
    assert "model: checkpoint 2 of" in cli("eval", run, "--step", "best", "--json").err
    assert "--step 1 chooses a checkpoint of a run" in cli("eval", project.model, "--step", "1").sentence
    assert "'last' is no step; give a number, or best" in cli("eval", run, "--step", "last").sentence


def test_train_says_where_it_leaves_the_preset_that_it_names(project: Project, tmp_path: Path) -> None:
    words = ["algorithm=dapo_loss", "algorithm.clip_ratio_high=0.3", "trainer.max_steps=1"]
    result = cli("train", "--config", project.config, *words, "--out", tmp_path / "run")
    assert result.code == 0
    assert "algorithm.clip_ratio_high is 0.3; the preset algorithm=dapo_loss has 0.28" in result.err


def test_an_interrupted_run_continues_to_the_run_that_was_never_interrupted(
    trained: Path, interrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(interrupted, run, symlinks=True)
    resumed = cli("train", "--resume", run, "--json")
    assert resumed.code == 0
    assert "resumed at step 1: 6 samples trained" in resumed.err
    assert resumed.record["steps"] == 2
    same = cli("diff", trained, run)
    assert (same.code, same.out) == (0, "equal over 2 common steps (1 to 2)\n")


def test_a_resume_from_another_directory_changes_nothing_before_its_inputs_are_found(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    run = tmp_path / "run"
    with interrupted_after(step=1):
        cli("train", "--config", project.config, "--out", run, "model.path=model")
    settings = run / "config.yaml"  # as they were written by versions that kept relative paths
    settings.write_text(
        settings.read_text().replace(f"path: {project.folder / 'model'}\n", "path: model\n", 1)
    )
    record(settings.read_text())
    before = (run / "events.jsonl").read_bytes()
    monkeypatch.chdir(tmp_path)
    sentence = cli("train", "--resume", run, "--trust-code").sentence
    assert (
        f"reads model.path=model, which is in {project.folder}, where it was started, and not here"
        in sentence
    )
    assert (run / "events.jsonl").read_bytes() == before
    monkeypatch.chdir(project.folder)
    assert cli("train", "--resume", run).code == 0


def test_an_interrupt_says_how_to_continue(project: Project, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with interrupted_after(step=0):
        result = cli("train", "--config", project.config, "--out", run)
    assert result.code == 130
    assert result.err.endswith(f"interrupted; continue with `strop train --resume {run}`\n")
    assert "Traceback" not in result.err


def test_a_finished_run_says_so(trained: Path, tuned: Path) -> None:
    result = cli("train", "--resume", trained, "--json")
    assert result.code == 0
    assert f"{trained} is finished; nothing to resume" in result.err
    assert (result.record["steps"], result.record["pass_rate_final"]) == (2, 0.0)
    again = cli("sft", "--resume", tuned, "--json")
    assert again.code == 0
    assert again.record["loss"] > 1


def test_a_finished_run_that_has_lost_its_checkpoints(trained: Path, tuned: Path, tmp_path: Path) -> None:
    for name, run in {"train": trained, "sft": tuned}.items():
        copy = tmp_path / name
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints", "model"))
        assert f"{copy} is finished; nothing to resume" in cli(name, "--resume", copy).err
        for words in (["eval", copy], ["generate", copy], ["export", copy, tmp_path / "out"]):
            assert f"{copy} has no valid checkpoint" in cli(*words).sentence
    config = read_config(Config, tmp_path / "sft" / "config.yaml")
    with pytest.raises(RunError, match="is finished and has no valid checkpoint left; remove it"):
        _sft(tmp_path / "sft", config)


def test_the_end_of_a_fine_tuning_may_have_been_recorded_by_another_command(
    tuned: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tuned, run, symlinks=True)
    log = run / "events.jsonl"
    *lines, last = log.read_text().splitlines()
    end = {key: value for key, value in json.loads(last).items() if not key.endswith("loss")}
    log.write_text("\n".join([*lines, json.dumps(end)]) + "\n")
    assert "loss nan" in cli("sft", "--resume", run).out


def test_a_damaged_checkpoint_is_passed_over_with_a_sentence(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run, symlinks=True)
    events = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(line for line in events if '"finished"' not in line))
    weights = run / "checkpoints" / "global_step_2" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    result = cli("train", "--resume", run)
    assert result.code == 0
    assert "ckpt 2 is damaged: model/model.safetensors has" in result.err
    assert "using 1" in result.err
    assert cli("diff", trained, run).code == 0


def test_sft_gives_a_model_that_train_starts_from(project: Project, tuned: Path, tmp_path: Path) -> None:
    out = tmp_path / "rl"
    result = cli(
        "train", "--config", project.config, "--out", out, f"model.path={tuned / 'model'}",
        "trainer.max_steps=1", "eval.before_train=false", "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert result.record["pass_rate_start"] is None


def test_the_last_line_of_sft_is_json(project: Project, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = cli("sft", "--config", project.config, "--out", run, "--json")
    assert result.code == 0
    record = result.record
    assert set(record) == {"run", "model", "steps", "seconds", "loss", "val_loss"}
    assert (Path(record["model"]) / "model.safetensors").is_file()
    assert 3 < record["val_loss"] < 6, "about ln(102) for a model that knows nothing"


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_start_that_fails_leaves_no_folder(project: Project, tmp_path: Path, command: str) -> None:
    run = tmp_path / "run"
    (tmp_path / "empty").mkdir()
    result = cli(command, "--config", project.config, "--out", run, f"model.path={tmp_path / 'empty'}")
    assert f"model.path {str(tmp_path / 'empty')!r}" in result.sentence
    assert f"run folder {run} removed again: nothing had begun" in result.err
    assert not run.exists()


def test_no_refusal_before_the_first_step_leaves_a_folder(
    project: Project, trained: Path, tmp_path: Path
) -> None:
    """Whatever is wrong with another run that the settings name."""
    run = tmp_path / "run"
    for command, setting in (
        ("train", f"trainer.skip_rollout={tmp_path}"),
        ("train", f"trainer.skip_rollout={trained}"),
        ("sft", f"sft.data.train_files=[{trained}]"),
    ):
        more = (
            ["run.save_every=0", "trainer.max_steps=50"]
            if command == "train"
            else ["sft.data.keep.min_score=9"]
        )
        result = cli(command, "--config", project.config, "--out", run, setting, *more)
        assert result.code != 0, setting
        assert f"run folder {run} removed again: nothing had begun" in result.err, setting
        assert not run.exists()


def test_the_default_folder_is_named_after_command_and_time(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = cli("train", "--config", project.config, f"model.path={tmp_path}")
    assert "run folder: runs/train-2" in result.err


def test_resume_refuses_what_it_would_ignore(
    project: Project, trained: Path, tuned: Path, tmp_path: Path
) -> None:
    assert "so --config has no place" in cli(
        "train", "--resume", trained, "--config", project.config
    ).sentence  # fmt: skip
    other = cli("train", "--resume", trained, "trainer.seed=1").sentence
    assert "trainer.seed is 0 in this run, and 1 would make it another one" in other
    assert "where it runs: resources.…; what is saved and shown: run.…, trainer.trackers" in other
    assert "is a run of `strop sft`" in cli("train", "--resume", tuned).sentence
    assert "does not exist" in cli("train", "--resume", tmp_path / "none").sentence


def test_what_the_program_advises_to_set_is_accepted_on_resume(interrupted: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(interrupted, run, symlinks=True)
    settings = {
        "run.save_samples": False,
        "trainer.trackers": ["jsonl"],
        "reward.timeout_s": 20.0,
        "reward.max_failed_share": 0.5,
        "rollout.timeout_s": 700.0,
        "agent.timeout_s": 3000.0,
        "actor.engine.max_tokens_per_device": 8192,
        "resources.call_timeout_s": 1800.0,
    }
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    result = cli("train", "--resume", run, *words)
    assert result.code == 0, result.err
    assert "run.save_samples=false from step 2 on; it was true\n" in result.err
    with RunFolder.open(run, read_only=True) as done:
        (resumed,) = done.events.read("resumed")
        assert (done.samples.steps(), resumed["settings"]) == ([1], settings)
    kept = read_config(Config, run / "config.yaml")
    assert not kept.run.save_samples, "it holds from here on"
    assert kept.resources.call_timeout_s == 3600, "of the machine: for this continuation"


def test_a_folder_in_use_is_refused(project: Project, trained: Path, tmp_path: Path) -> None:
    assert f"continue it with --resume {trained}" in cli(
        "train", "--config", project.config, "--out", trained
    ).sentence  # fmt: skip
    assert (
        "is no run folder"
        in cli("train", "--config", project.config, "--out", project.folder / "data").sentence
    )
    (tmp_path / "file").write_text("")
    assert (
        "Not a directory"
        in cli("train", "--config", project.config, "--out", tmp_path / "file" / "run").sentence
    )


@pytest.mark.parametrize("command", ["train", "sft"])
def test_an_error_after_the_update_of_a_step_is_in_the_records_too(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("no such luck")

    monkeypatch.setattr(Checkpointer, "save", fails)
    run = tmp_path / "run"
    failed = cli(command, "--config", project.config, "--out", run, "run.save_every=1")
    assert failed.sentence.startswith(f"strop {command}: no such luck")
    incident = cli("incident", run, "--json").record
    assert (incident["state"], incident["step"], incident["phase"], incident["error"]) == (
        "crashed", 1, "save_checkpoint", "ValueError: no such luck",
    )  # fmt: skip
    (listed,) = cli("runs", run, "--json").record["runs"]
    assert (listed["status"], listed["reason"]) == ("failed", "ValueError: no such luck")
