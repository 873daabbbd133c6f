"""Steps that begin more prompts than they train."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from test_ahead_runs import trained
from test_ray_runs import RAY, cut_after
from test_virtual_clock import SLOW
from tiny_runs import Done, Project, chain_of, check_records, resume_in, train_in

from strop.cli.main import main
from strop.config.errors import ConfigError
from strop.run import RunFolder
from strop.trainer.collectors.over_issue import SLOWEST

OVER = [
    "rollout.over_issue=0.5",
    "trainer.max_steps=6",
    "data.max_response_tokens=8",
    "data.val_files=[]",
    "reward.num_workers=1",
]
DROP, LATER = [*OVER, "rollout.slowest=drop"], [*OVER, "rollout.slowest=later"]

RARE = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_rounds=2"]
"""Hardly a group can teach: steps come to their limit."""


def told(done: Done, what: str) -> list[float]:
    return [numbers[f"training/over_issue/{what}"] for numbers in done.steps]


def lengths(folder: Path, step: int) -> dict[str, int]:
    """By uid, tokens of the longest answer of a step."""
    longest: Counter[str] = Counter()
    with RunFolder.open(folder, read_only=True) as run:
        for row in run.samples.read(step):
            longest[row["uid"]] = max(longest[row["uid"]], len(row["response_ids"]))
    return dict(longest)


@pytest.mark.usefixtures("engine_clock")
def test_the_slowest_are_dropped_and_the_ledger_says_so(project: Project, tmp_path: Path) -> None:
    done = train_in(tmp_path / "run", project.config(*DROP))
    check_records(done.folder, num_steps=6)
    assert told(done, "dropped_prompts") == [2.0] * 6
    assert min(told(done, "discarded_tokens")) > 0
    assert [len(record.reports) for record in done.records] == [16] * 6
    assert {report.versions for record in done.records for report in record.reports} == {
        (step, step) for step in range(6)
    }, "all are of the policy that learns from them"
    with RunFolder.open(done.folder, read_only=True) as run:
        settled = [event["fates"].get("filtered", {}) for event in run.events.read("settled")]
        assert not run.ledger.in_flight()
    dropped = [fates[SLOWEST] for fates in settled if SLOWEST in fates]
    assert [len(one) for one in dropped] == [2] * 6


@pytest.mark.usefixtures("engine_clock")
def test_a_run_of_epochs_that_drops_prompts_has_no_step_without_samples(
    project: Project, tmp_path: Path
) -> None:
    # A step of four prompts uses up six visits, so 20 rows are three steps and a shorter one.
    epochs = ["trainer.max_steps=null", "trainer.num_epochs=1", "data.max_train_prompts=20"]
    config = project.config(*DROP, *epochs)
    done = train_in(tmp_path / "run", config)
    assert [len(record.reports) for record in done.records] == [16, 16, 16, 8]
    with RunFolder.open(done.folder, read_only=True) as run:
        assert len(run.ledger.consumed()) == 20


@pytest.mark.usefixtures("engine_clock")
def test_a_step_takes_what_ends_first(project: Project, tmp_path: Path) -> None:
    """By the clock of engine steps a group lasts as long as its longest answer: those of a step that are trained are
    the shortest of those that were begun, as a larger step without a surplus shows."""
    long = ["trainer.max_steps=1", "data.max_response_tokens=40", "rollout.samples_per_prompt=2"]
    long += ["rollout.stop_token_ids=[40,41,42,43,44,45]"]
    larger = ["rollout.over_issue=0", "data.prompts_per_step=6"]
    whole = train_in(tmp_path / "whole", project.config(*OVER, *long, *larger))
    done = train_in(tmp_path / "run", project.config(*DROP, *long))
    every = lengths(whole.folder, 1)
    taken = lengths(done.folder, 1)
    assert taken.items() <= every.items()
    left_out = [every[uid] for uid in every.keys() - taken.keys()]
    assert len(set(every.values())) > 1, "they differ"
    assert max(taken.values()) <= min(left_out)


@pytest.mark.usefixtures("engine_clock")
def test_prompts_that_are_set_aside_are_trained_later_each_once(project: Project, tmp_path: Path) -> None:
    done = train_in(tmp_path / "run", project.config(*LATER))
    check_records(done.folder, num_steps=6)
    assert told(done, "waiting_prompts") == [2, 4, 0, 2, 4, 0]
    assert told(done, "is_long_round") == [0, 0, 1, 0, 0, 1]
    assert sum(told(done, "dropped_prompts")) == 0
    plain = train_in(tmp_path / "plain", project.config(*OVER, "rollout.over_issue=0"))
    assert trained(done.folder) == trained(plain.folder), "the same prompts, each once"
    for record in done.records:
        assert {report.versions for report in record.reports} == {(record.step - 1, record.step - 1)}


@pytest.mark.usefixtures("engine_clock")
def test_the_end_of_a_run_takes_what_is_set_aside(project: Project, tmp_path: Path) -> None:
    done = train_in(tmp_path / "run", project.config(*LATER, "trainer.max_steps=5"))
    assert told(done, "is_long_round") == [0, 0, 1, 0, 1]
    assert set(trained(done.folder).values()) == {1}
    with RunFolder.open(done.folder, read_only=True) as run:
        assert run.ledger.counts()["in_flight"] == 0
        assert run.ledger.counts()["trained"] == 5 * 16


@pytest.mark.usefixtures("engine_clock")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(DROP, marks=pytest.mark.slow),
        LATER,
        pytest.param([*LATER, *RARE], marks=pytest.mark.slow),
        pytest.param([*DROP, *RARE], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("step", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_interrupted_run_is_the_one_that_was_not(
    project: Project, tmp_path: Path, settings: list[str], step: int
) -> None:
    saved = ["run.save_every=2", "run.keep_last=9"]
    whole = train_in(tmp_path / "whole", project.config(*settings, *saved))
    folder = cut_after(whole.folder, tmp_path / "cut", step=step)
    rest = resume_in(folder)
    check_records(folder, num_steps=6)
    assert [print_.chain for print_ in rest.chain] == [print_.chain for print_ in whole.chain]


def test_by_the_clock_on_the_wall_and_with_a_filter(project: Project, tmp_path: Path) -> None:
    filtered = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score"]
    done = train_in(tmp_path / "run", project.config(*LATER, *filtered, "rollout.samples_per_prompt=2"))
    check_records(done.folder, num_steps=6)
    for record in done.records:
        assert len({report.uid for report in record.reports} - record.dropped.keys()) == 4
    assert set(trained(done.folder).values()) == {1}


@pytest.mark.dist
@pytest.mark.parametrize("placed", [["resources.ranks=2"], ["resources.apart={rollout: 1}"]])
@pytest.mark.parametrize("settings", [DROP, LATER])
def test_several_processes_do_the_same(
    project: Project, tmp_path: Path, placed: list[str], settings: list[str]
) -> None:
    done = train_in(tmp_path / "run", project.config(*settings, *RAY, *placed))
    check_records(done.folder, num_steps=6)
    assert [len(record.reports) for record in done.records] == [16] * 6
    assert set(trained(done.folder).values()) == {1}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["rollout.max_staleness=1"], "what a step does not wait for is kept for the next one"),
        (["trainer.skip_rollout=x"], "which are all there at once: remove rollout.over_issue"),
        (["algorithm.adv_estimator=remax"], "which is not had with rollout.over_issue"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(
    project: Project, given: list[str], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        project.config("rollout.over_issue=0.25", *given)


@pytest.mark.slow
def test_it_is_made_again_by_its_record(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the clock on the wall, where another run of the seed takes other groups."""
    (tmp_path / "slow.py").write_text(SLOW)
    jittery = [f"reward.path='{tmp_path / 'slow.py'}'", "reward.num_workers=3", "rollout.deterministic=true"]
    done = train_in(tmp_path / "run", project.config(*LATER, *jittery))
    words = ["replay", str(done.folder), "--out", str(tmp_path / "again"), "--trust-code"]
    assert main(words) == 0, capsys.readouterr().err
    assert chain_of(tmp_path / "again") == done.chain
