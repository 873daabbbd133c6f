"""Recorded runs that are made again: `strop replay`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_ahead_runs import AHEAD, FEW, check_bound
from test_ray_runs import RAY, cut_after
from test_virtual_clock import SLOW
from tiny_runs import Done, Project, check_records, resume_in, train_in

from strop.cli.main import main
from strop.run import RunFolder
from strop.run.replay_schedule import compare_schedules, read_schedule
from strop.trainer.config import Config

EXACT = [
    *AHEAD,
    *FEW,
    "rollout.deterministic=true",
    "data.val_files=[]",
    "run.save_every=1",
    "run.keep_last=9",
]


@pytest.fixture(scope="module")
def jittery(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Scores that take another time in each run, in three processes: what ends first is never the same.

    Answers are long enough to be under way when new weights come, also on a fast machine.
    """
    file = tmp_path_factory.mktemp("jittery") / "slow.py"
    file.write_text(SLOW)
    return [*EXACT, f"reward.path='{file}'", "reward.num_workers=3", "data.max_response_tokens=16"]


@pytest.fixture(scope="module")
def recorded(project: Project, jittery: list[str], tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run of three steps ahead by the clock on the wall."""
    config = project.config(*jittery, "trainer.max_steps=3", "rollout.max_staleness=1")
    return train_across(tmp_path_factory.mktemp("recorded"), config)


def train_across(folder: Path, config: Config) -> Done:
    """A run, in a folder below this one, in which a request went on across new weights.

    Whether one does is a matter of time; where the machine was too quick or too busy for it, another run is recorded.
    """
    for number in range(20):
        done = train_in(folder / f"run-{number}", config)
        if num_spans(done) > 0:
            break
    return done


def replayed(run: Path, out: Path, capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, object]:
    """The last line of the command, which has found the runs equal; with all that it said."""
    code = main(["replay", str(run), "--out", str(out), "--json", "--trust-code", *given])
    told = capsys.readouterr()
    assert code == 0, f"{told.out}{told.err}"
    found: dict[str, object] = json.loads(told.out.splitlines()[-1])
    return {**found, "said": told.out + told.err}


def chains(folder: Path) -> list[str]:
    with RunFolder.open(folder, read_only=True) as run:
        return [one.chain for one in run.fingerprints.read()]


def num_spans(done: Done) -> int:
    """Requests that went on across new weights."""
    return sum(
        report.versions[0] < report.versions[1] for record in done.records for report in record.reports
    )


def test_a_run_ahead_by_the_clock_on_the_wall_is_made_again(
    recorded: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_made_again(recorded, tmp_path, capsys, num_steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [1, 2.5])
def test_a_longer_run_is_made_again(
    project: Project, tmp_path: Path, jittery: list[str], bound: float, capsys: pytest.CaptureFixture[str]
) -> None:
    done = train_across(tmp_path, project.config(*jittery, f"rollout.max_staleness={bound:g}"))
    is_made_again(done, tmp_path, capsys, num_steps=5)


def is_made_again(done: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, num_steps: int) -> None:
    """Its replay has the same samples, weights and schedule."""
    check_records(done.folder, num_steps=num_steps)
    assert num_spans(done) > 0
    found = replayed(done.folder, tmp_path / "again", capsys)
    assert (found["equal"], found["num_common_steps"]) == (True, num_steps)
    assert chains(done.folder) == chains(tmp_path / "again")
    check_records(tmp_path / "again", num_steps=num_steps)
    with (
        RunFolder.open(done.folder, read_only=True) as one,
        RunFolder.open(tmp_path / "again", read_only=True) as two,
    ):
        assert read_schedule(one.events) == read_schedule(two.events)


@pytest.mark.slow
def test_another_run_of_the_same_settings_is_another_one(
    project: Project, tmp_path: Path, jittery: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What the schedule is needed for; and where the two part is told."""
    one, two = (train_in(tmp_path / name, project.config(*jittery)) for name in ("one", "two"))
    assert chains(one.folder) != chains(two.folder)
    assert main(["diff", str(one.folder), str(two.folder), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["cause"] == "schedule"
    with RunFolder.open(one.folder, read_only=True) as a, RunFolder.open(two.folder, read_only=True) as b:
        schedules = read_schedule(a.events), read_schedule(b.events)
    found = compare_schedules(*schedules, until=5)
    assert found is not None
    assert compare_schedules(*schedules, until=found.step - 1) is None
    assert main(["diff", str(one.folder), str(two.folder)]) == 1
    assert f"their schedules part in step {found.step}, which {found.text}" in capsys.readouterr().out


def test_numbers_that_differ_under_one_schedule_are_told_from_it(
    recorded: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", str(recorded.folder), "--out", str(tmp_path / "again"), "--trust-code"]
    assert main([*words, "actor.engine.max_tokens_per_device=40"]) == 1  # sums in another order
    assert "differs first in" in capsys.readouterr().out
    assert main(["diff", str(recorded.folder), str(tmp_path / "again"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["cause"] == "numbers"


@pytest.mark.dist
@pytest.mark.parametrize("placed", [["resources.apart={rollout: 1}"], ["resources.apart={rollout: 2}"]])
def test_a_run_of_several_processes_is_made_again_in_one(
    project: Project,
    tmp_path: Path,
    jittery: list[str],
    placed: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = train_in(tmp_path / "run", project.config(*jittery, *RAY, *placed, "rollout.max_staleness=2"))
    check_bound(done, 2)
    alone = ["resources.runtime=inline", "resources.apart={}"]
    assert replayed(done.folder, tmp_path / "again", capsys, *alone)["equal"]
    assert chains(done.folder) == chains(tmp_path / "again")


@pytest.mark.slow
def test_groups_that_are_left_out_and_replaced_are_so_again(
    project: Project, tmp_path: Path, jittery: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    filtered = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score"]
    done = train_in(
        tmp_path / "run",
        project.config(*jittery, *filtered, "rollout.samples_per_prompt=2", "trainer.max_steps=4"),
    )
    assert sum(numbers["training/filter_groups/evicted_samples"] for numbers in done.steps) > 0
    assert replayed(done.folder, tmp_path / "again", capsys)["equal"]


@pytest.mark.slow
def test_a_run_that_was_interrupted_is_made_again_without_the_break(
    project: Project, tmp_path: Path, jittery: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train_in(tmp_path / "whole", project.config(*jittery))
    folder = cut_after(whole.folder, tmp_path / "cut", step=2)
    resume_in(folder)
    found = replayed(folder, tmp_path / "again", capsys)
    assert (found["equal"], found["num_common_steps"]) == (True, 5)


@pytest.mark.slow
def test_a_replay_that_is_interrupted_goes_on_by_the_schedule(
    project: Project, tmp_path: Path, jittery: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    done = train_in(tmp_path / "run", project.config(*jittery))
    replayed(done.folder, tmp_path / "again", capsys)
    folder = cut_after(tmp_path / "again", tmp_path / "cut", step=2)
    resume_in(folder)
    assert chains(folder) == chains(done.folder)


@pytest.mark.slow
def test_a_run_that_follows_from_its_seed_needs_no_schedule(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = train_in(tmp_path / "run", project.config(*EXACT, "rollout.max_staleness=0"))
    found = replayed(done.folder, tmp_path / "again", capsys)
    assert found["equal"]
    assert "is made again to step 5, from its seed" in str(found["said"])


@pytest.mark.slow
def test_a_run_that_stopped_early_is_made_again_as_far_as_it_came(
    project: Project, tmp_path: Path, jittery: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train_in(tmp_path / "whole", project.config(*jittery))
    folder = cut_after(whole.folder, tmp_path / "cut", step=3)
    lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 3))
    found = replayed(folder, tmp_path / "again", capsys)
    assert found["num_common_steps"] == 3
    assert chains(tmp_path / "again") == chains(whole.folder)[:3]


def test_other_settings_make_no_repetition(
    recorded: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["replay", str(recorded.folder), "--out", str(tmp_path / "again"), "--trust-code"]
    assert main([*words, "actor.optim.lr=0.5"]) == 2
    assert "with another value it is no repetition" in capsys.readouterr().err
    assert main([*words, "trainer.seed=3"]) == 2
    assert "would make it another one" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
