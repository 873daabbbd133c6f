"""A run in the hands of a person: longer, with another learning rate, ended early, begun from another run."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from tiny_runs import Done, Project, check_records, resume_in, train_in

from strop.config import ConfigError
from strop.run import RunFolder
from strop.run.config import RunConfig
from strop.trainer import loop
from strop.trainer.early_stopping import EarlyStopping, has_stalled, ranks_of
from strop.trainer.fault_tolerance.machine import MACHINE_ENDS, MachineEnd
from strop.trainer.fault_tolerance.signals import Terminated
from strop.trainer.loading import read
from strop.trainer.reward_certificate import save_certificate
from strop.trainer.sections import TrainerConfig
from strop.trainer.start import resume_run, start_run
from strop.trainer.train import train
from strop.trainer.validation import Validation, summarize_validation
from strop.workers.reports import EpisodeReport


def events(run: Path, kind: str) -> list[dict[str, object]]:
    with RunFolder.open(run, read_only=True) as folder:
        return folder.events.read(kind)


def saved(run: Path) -> list[int]:
    with RunFolder.open(run, read_only=True) as folder:
        return folder.checkpoints.steps()


def scripted(monkeypatch: pytest.MonkeyPatch, *rates: float) -> None:
    """Validations that pass so much, one after the other."""
    following = iter(rates)

    def summary(reports: Sequence[EpisodeReport], *, undecided: Collection[str]) -> Validation:
        made = summarize_validation(reports, undecided=undecided)
        return dataclasses.replace(made, num_passed=round(next(following) * made.num_answers))

    monkeypatch.setattr(loop, "summarize_validation", summary)


# ------------------------------------------------------------------ longer, and otherwise


@pytest.mark.slow
def test_a_finished_run_that_is_made_longer_is_the_longer_run(project: Project, tmp_path: Path) -> None:
    whole = train_in(tmp_path / "whole", project.config("trainer.max_steps=5"))
    run = train_in(tmp_path / "run", project.config("trainer.max_steps=3")).folder
    longer = resume_in(run, "trainer.max_steps=5")
    assert [record.step for record in longer.records] == [4, 5]
    assert [one.chain for one in longer.chain] == [one.chain for one in whole.chain]
    check_records(run, num_steps=5)
    assert any("trainer.max_steps=5 from step 4 on; it was 3" in line for line in longer.said)
    (resumed,) = events(run, "resumed")
    assert (resumed["settings"], resumed["before"]) == ({"trainer.max_steps": 5}, {"trainer.max_steps": 3})
    assert read(run / "config.yaml").trainer.max_steps == 5
    (finished,) = events(run, "finished")
    assert finished["step"] == 5
    again = resume_run(run, say=lambda line: None)
    again.run.close()
    assert again.is_finished


@pytest.mark.slow
def test_another_learning_rate_holds_from_there_on_also_after_a_crash(
    project: Project, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = ["run.save_every=1", "trainer.max_steps=2"]
    first = train_in(run, project.config(*settings))
    second = resume_in(run, "trainer.max_steps=3", "actor.optim.lr=2e-3")
    third = resume_in(run, "trainer.max_steps=4")
    assert [step["actor/lr"] for step in first.steps] == [1e-3] * 2
    assert [step["actor/lr"] for step in third.steps] == [1e-3] * 2 + [2e-3] * 2
    assert second.records[0].step == 3
    assert read(run / "config.yaml").actor.optim.lr == 2e-3


def test_where_a_run_happens_is_for_one_continuation(on_policy: Done, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(on_policy.folder, run)
    resume_in(run, "trainer.max_steps=4", "resources.call_timeout_s=99")
    kept = read(run / "config.yaml")
    assert kept.trainer.max_steps == 4
    assert kept.resources.call_timeout_s == 3600
    assert events(run, "resumed")[0]["settings"] == {"trainer.max_steps": 4, "resources.call_timeout_s": 99.0}


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("trainer.max_steps=2", r"trainer.max_steps=2 ends before step 3, which .* has done.*--from .*@STEP"),
        ("trainer.num_epochs=1", r"trainer.num_epochs=1 ends before step 3.*it was 4"),
        (
            "trainer.seed=7",
            r"trainer.seed is 0 in this run.*every sample, follow from the seed.*--from .*run",
        ),
        ("actor.optim.name=muon", r"hold the state of another optimizer"),
        ("algorithm.kl_loss_coef=0.5", r"its loss would be another one"),
    ],
)
def test_what_cannot_be_given_anew_leaves_the_run_as_it_was(
    setting: str, sentence: str, on_policy: Done, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(on_policy.folder, run)
    before = (run / "config.yaml").read_text(), (run / "events.jsonl").read_text()
    with pytest.raises(ConfigError, match=sentence):
        resume_run(run, overrides=[setting], say=lambda line: None)
    assert before == ((run / "config.yaml").read_text(), (run / "events.jsonl").read_text())


# ------------------------------------------------------------------ ended early


def test_validations_without_a_pass_rate_are_compared_by_their_rewards() -> None:
    """Rewards below zero: -0.5, -0.4 and -0.2 rise, and pass rates of 0 would have stalled."""
    rising = [{"pass_rate": None, "reward": reward} for reward in (-0.5, -0.4, -0.2)]
    assert ranks_of(rising) == ([-0.5, -0.4, -0.2], False)
    assert not has_stalled(ranks_of(rising)[0], 1)
    assert has_stalled(ranks_of(rising[::-1])[0], 2)
    rated = [{"pass_rate": 0.5, "reward": 2.0}, {"pass_rate": 0.25, "reward": 3.0}]
    assert ranks_of(rated) == ([0.5, 0.25], True)
    assert ranks_of([*rated, {"pass_rate": None, "reward": None}])[0][:2] == [2.0, 3.0]


REWARDS_BELOW_ZERO = """
calls = 0


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return -1 - ord((solution_str or " ")[0]) % 8 / 10


def one(**_):
    return 1.0


def none(**_):
    return 0.0
"""


def test_a_run_without_a_pass_rate_says_so_everywhere(
    project: Project, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Patience compares mean rewards, the best checkpoint is one by them, a target of passing is never reached."""
    file = tmp_path / "below.py"
    file.write_text(REWARDS_BELOW_ZERO)
    run = train_in(
        tmp_path / "run",
        project.config(
            f"reward.path='{file}'", "eval.every=1", "data.max_val_prompts=4", "run.save_every=1",
            "trainer.target_pass_rate=0.5", "trainer.preflight=true",
        ),
    )  # fmt: skip
    validations = events(run.folder, "validation")
    assert [one["pass_rate"] for one in validations] == [None] * 4
    rewards = [float(str(one["reward"])) for one in validations]
    assert all(-1.7 <= reward <= -1 for reward in rewards)
    assert (run.result.pass_rate_start, run.result.pass_rate_final) == (None, None)
    assert (run.result.reward_start, run.result.reward_final) == (rewards[0], rewards[-1])
    assert run.result.best is not None
    assert run.result.best[1] == max(rewards[1:])
    assert not any("pass rate" in line.replace("no pass rate", "") for line in run.said)
    said = next(one for one in run.said if f"validation mean reward {rewards[0]:.4g} (95 % interval " in one)
    assert " on 4 answers; no pass rate" in said
    assert "target_pass_rate=0.5 cannot end this run" in caplog.text
    assert all("val-core/pass_rate" not in numbers for numbers in run.metrics)
    assert run.metrics[0]["val-core/mean_reward"] == rewards[0]


PARTIAL_CREDIT = """
SCORES = iter([0.5] + [1.0] * 1000)

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return next(SCORES)
"""


def test_after_one_reward_between_0_and_1_no_validation_has_a_pass_rate(
    project: Project, tmp_path: Path
) -> None:
    """The first answer of all gets half, in the validation before training; every later one gets 1."""
    file = tmp_path / "partial.py"
    file.write_text(PARTIAL_CREDIT)
    settings = [
        f"reward.path={file}", "reward.num_workers=1", "data.max_val_prompts=4", "eval.every=1",
        "trainer.max_steps=2", "trainer.target_pass_rate=0.5",
    ]  # fmt: skip
    run = train_in(tmp_path / "run", project.config(*settings))
    validations = events(run.folder, "validation")
    assert [one["pass_rate"] for one in validations] == [None, None, None]
    assert [one["reward"] for one in validations] == [0.875, 1.0, 1.0]
    assert run.result.steps == 2, "a target that nothing can reach ends no run"
    names = {name for numbers in run.metrics for name in numbers if name.startswith("val-")}
    assert "val-core/mean_reward" in names
    assert not [name for name in names if "/acc/" in name]
    (undecided,) = events(run.folder, "undecided")
    assert (undecided["step"], undecided["score"]) == (0, 0.5)


def test_a_format_reward_of_wrong_answers_solves_nothing(project: Project, tmp_path: Path) -> None:
    """Every answer gets 1 for its format and 0 for being right: with pass_by none passes, and no group is solved."""
    file = tmp_path / "below.py"
    file.write_text(REWARDS_BELOW_ZERO)
    functions = f"reward.functions=[{{path: '{file}', name: none}}, {{path: '{file}', name: one}}]"
    settings = ["reward.path=''", functions, "data.max_val_prompts=4", "eval.every=1", "trainer.max_steps=1"]
    summed = train_in(tmp_path / "summed", project.config(*settings))
    assert summed.result.pass_rate_final is None
    assert summed.steps[0]["rollout/groups_all_equal"] == 1.0
    marked = train_in(tmp_path / "marked", project.config(*settings, "reward.pass_by=none"))
    assert marked.result.pass_rate_final == 0.0
    groups = [marked.steps[0][f"rollout/groups_{kind}"] for kind in ("all_max", "all_min", "all_equal")]
    assert groups == [0.0, 1.0, 0.0]
    other = train_in(tmp_path / "other", project.config(*settings, "reward.pass_by=one"))
    assert other.result.pass_rate_final == 1.0


@pytest.mark.parametrize(
    ("rates", "patience", "expected"),
    [
        ([0.1], 1, False),
        ([0.1, 0.1], 1, True),
        ([0.1, 0.2], 1, False),
        ([0.3, 0.2, 0.25], 2, True),
        ([0.3, 0.2, 0.35], 2, False),
        ([0.3, 0.35, 0.2], 2, False),
        ([0.3, 0.35, 0.35, 0.2], 2, True),
    ],
)
def test_patience_by_hand(rates: list[float], patience: int, expected: bool) -> None:
    assert has_stalled(rates, patience) is expected


@pytest.mark.slow
def test_a_target_that_is_reached_ends_the_run_with_a_checkpoint(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, 1, 0.25, 0.5)
    run = tmp_path / "run"
    done = train_in(run, project.config("trainer.target_pass_rate=0.5", "eval.every=1"))
    (finished,) = events(run, "finished")
    assert finished["step"] == done.result.steps == 2
    assert finished["reason"] == "trainer.target_pass_rate=0.5 is reached: 50.0 %"
    assert saved(run) == [2]
    assert "the run ends after step 2: trainer.target_pass_rate=0.5 is reached: 50.0 %" in done.said
    scripted(monkeypatch, 0.5)
    longer = resume_in(run, "trainer.target_pass_rate=null")
    assert [record.step for record in longer.records] == [3]


@pytest.mark.slow
def test_patience_ends_the_run_and_the_best_checkpoint_is_kept(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, 0, 0.25, 0.75, 0.5, 0.5)
    run = tmp_path / "run"
    settings = [
        "trainer.max_steps=6",
        "trainer.patience=2",
        "eval.every=1",
        "run.save_every=5",
        "run.keep_last=1",
    ]
    done = train_in(run, project.config(*settings))
    (finished,) = events(run, "finished")
    assert finished["step"] == 4
    assert finished["reason"] == "trainer.patience=2: no validation since was better than 75.0 %"
    assert done.result.best == (2, 0.75)
    assert saved(run) == [2, 4], "step 1 was the best then, and is no longer kept"


def test_a_crash_after_the_last_validation_does_not_train_on(on_policy: Done, tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", config={}, command=["strop"]) as run:
        for step, rate in enumerate([0.5, 0.25, 0.25]):
            run.events.append("validation", step, pass_rate=rate)
        assert EarlyStopping(TrainerConfig(patience=2), run, num_steps=9).reason.startswith(
            "trainer.patience=2"
        )
        assert EarlyStopping(TrainerConfig(patience=3), run, num_steps=9).reason == ""


def test_the_hours_of_all_continuations_count(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", config={}, command=["strop"]) as run:
        for step in (1, 2):
            run.events.append("step", step, seconds=1800.0)
        ending = EarlyStopping(TrainerConfig(max_hours=1), run, num_steps=9)
        assert ending.check(3)
        assert ending.reason == "trainer.max_hours=1: it has trained for 1 hours"
        assert not EarlyStopping(TrainerConfig(max_hours=1.5), run, num_steps=9).check(3)
        last = EarlyStopping(TrainerConfig(), run, num_steps=3)
        assert not last.check(2)
        assert last.check(3)


@pytest.mark.parametrize("lacking", ["data.val_files=[]", "eval.every=0"])
@pytest.mark.parametrize("key", ["target_pass_rate=1", "patience=1"])
def test_what_ends_a_run_by_validations_needs_some(project: Project, lacking: str, key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"trainer.{key.split('=')[0]} is 1.*{lacking.split('=')[0]} is (0|empty)"
    ):
        project.config("eval.every=1", f"trainer.{key}", lacking)


# ------------------------------------------------------------------ a machine that is taken away


@pytest.mark.slow
def test_a_run_ends_before_its_machine_does_and_goes_on_elsewhere(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))
    run, said = tmp_path / "run", []
    config = project.config("run.save_before=3600")
    with (
        start_run(run, config, command=["strop", "train"]).run as folder,
        pytest.raises(Terminated) as caught,
    ):
        train(config, folder, say=said.append)
    assert caught.value.number == signal.SIGUSR1
    assert saved(run) == [1]
    (told,) = [line for line in said if "taken away" in line]
    assert "besides run.save_before=3600" in told
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 7200))
    assert [record.step for record in resume_in(run).records] == [2, 3]


def test_a_run_whose_last_step_is_done_is_finished_whatever_the_machine_does(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))
    run = train_in(tmp_path / "run", project.config("run.save_before=3600", "trainer.max_steps=1")).folder
    assert [event["step"] for event in events(run, "finished")] == [1]


def test_a_step_must_fit_before_the_machine_ends() -> None:
    at = {"STROP_MACHINE_ENDS_AT": str(time.time() + 100)}
    machine = MachineEnd(RunConfig(save_before=30), at)
    assert machine.passed(60) == ""  # 100 s are left, and 90 are needed
    assert "another step may take 80 s" in machine.passed(80)
    assert "another step may take 80 s" in machine.passed(1), "the longest one counts"


def test_what_a_variable_says_about_the_end_must_be_a_time() -> None:
    with pytest.raises(ValueError, match="SLURM_JOB_END_TIME is 'noon'"):
        MachineEnd(RunConfig(save_before=30), {"SLURM_JOB_END_TIME": "noon"})


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({}, "none of SLURM_JOB_END_TIME, "),
        ({"SLURM_JOB_END_TIME": "1000"}, "SLURM_JOB_END_TIME is 1000, which is past"),
    ],
)
def test_where_nothing_says_when_the_machine_ends_a_run_says_so_once_and_trains(
    environment: dict[str, str], why: str, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in MACHINE_ENDS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run, said = tmp_path / "run", []
    config = project.config("run.save_before=600", "trainer.max_steps=1")
    with start_run(run, config, command=["strop", "train"]).run as folder:
        train(config, folder, say=said.append)
    (told,) = [line for line in said if "run.save_before=600" in line]
    assert "has no effect" in told
    assert why in told
    assert [(event["step"], event["message"]) for event in events(run, "no_end_known")] == [(0, told)]
    assert [event["step"] for event in events(run, "finished")] == [1]


def test_every_variable_of_a_machines_end_is_read() -> None:
    for name in MACHINE_ENDS:
        machine = MachineEnd(RunConfig(save_before=30), {name: str(time.time() + 40)})
        assert "another step may take 20 s" in machine.passed(20), name


def test_the_verdict_about_a_reward_is_recorded_whether_or_not_a_preflight_is_wanted(
    project: Project, tmp_path: Path
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(solution_str, **_):\n    return float(len(solution_str))\n")
    save_certificate(reward, "compute_score", {"verdict": "doubtful"})
    config = project.config(f"reward.path={reward}", "trainer.max_steps=1", "trainer.preflight=false")
    run = train_in(tmp_path / "run", config).folder
    assert [(event["step"], event["verdict"]) for event in events(run, "reward_check")] == [(0, "doubtful")]
