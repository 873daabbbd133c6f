"""Runs ahead of training by a clock of engine steps: resumes, and the order in which groups are taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_ahead_runs import AHEAD, FEW, check_bound
from test_ray_runs import cut_after
from tiny_runs import Done, Project, check_records, resume_in, train_in
from virtual_clock import CLOCK_STEPS, LONG_TAIL, Delays, Distribution, virtual_clock

from strop.run import RunFolder
from strop.workers.async_rollout.in_play import IN_PLAY, read_in_play

VIRTUAL = [*AHEAD, *FEW, "run.save_every=1", "run.keep_last=9"]

COUNTED = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open({path!r}, "a") as file:
        file.write("asked\\n")
    return ord((solution_str or " ")[0]) % 8 / 10
"""
SLOW = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(os.urandom(1)[0] / 255 * 0.02)
    return ord((solution_str or " ")[0]) % 8 / 10
"""


@pytest.fixture(scope="module")
def jittery(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Scores that take another time in each run, in three processes."""
    file = tmp_path_factory.mktemp("jittery") / "slow.py"
    file.write_text(SLOW)
    return [*VIRTUAL, f"reward.path='{file}'", "reward.num_workers=3", NO_VALIDATION]


NO_VALIDATION = "data.val_files=[]"
pytestmark = pytest.mark.usefixtures("engine_clock")


@pytest.fixture(scope="module")
def validated(project: Project, jittery: list[str], tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run with a validation after each of its three steps."""
    folder = tmp_path_factory.mktemp("validated") / "whole"
    with virtual_clock():
        return train_in(folder, project.config(*with_validations(jittery)))


def with_validations(jittery: list[str]) -> list[str]:
    return [*(word for word in jittery if word != NO_VALIDATION), "eval.every=1", "trainer.max_steps=3"]


@pytest.mark.slow
def test_two_runs_are_the_same_to_the_bit_however_long_scoring_takes(
    project: Project, tmp_path: Path, validated: Done, jittery: list[str]
) -> None:
    two = train_in(tmp_path / "two", project.config(*with_validations(jittery)))
    assert [print_.chain for print_ in validated.chain] == [print_.chain for print_ in two.chain]


@pytest.mark.slow
@pytest.mark.parametrize("bound", [1, 2])
def test_a_run_that_is_interrupted_after_any_step_is_the_one_that_was_not(
    project: Project, tmp_path: Path, jittery: list[str], bound: int
) -> None:
    whole = train_in(tmp_path / "whole", project.config(*jittery, f"rollout.max_staleness={bound}"))
    for step in (1, 2, 3, 4):
        folder = cut_after(whole.folder, tmp_path / f"cut-{step}", step=step)
        rest = resume_in(folder)
        check_records(folder, num_steps=5)
        assert [print_.chain for print_ in rest.chain] == [print_.chain for print_ in whole.chain], step


def test_a_run_that_is_interrupted_beside_validations_is_the_one_that_was_not(
    tmp_path: Path, validated: Done
) -> None:
    assert all(any("val-core" in name for name in numbers) for numbers in validated.steps)
    check_bound(validated, 1)
    folder = cut_after(validated.folder, tmp_path / "cut", step=1)
    rest = resume_in(folder)
    check_records(folder, num_steps=3)
    assert [print_.chain for print_ in rest.chain] == [print_.chain for print_ in validated.chain]


@pytest.mark.parametrize(
    ("every", "step", "num_steps"), [(1, 1, 4), pytest.param(2, 2, 5, marks=pytest.mark.slow)]
)
def test_so_it_is_where_every_second_step_finds_its_groups_there(
    project: Project, tmp_path: Path, every: int, step: int, num_steps: int
) -> None:
    """Groups that a step began without having to wait go on beside the validation, and beside those of a later one."""
    words = [
        f"eval.every={every}",
        f"trainer.max_steps={num_steps}",
        f"run.save_every={step}",
        "run.keep_last=9",
    ]
    whole = train_in(tmp_path / "whole", project.config("rollout.max_staleness=1", *words))
    rest = resume_in(cut_after(whole.folder, tmp_path / "cut", step=step))
    assert [print_.chain for print_ in rest.chain] == [print_.chain for print_ in whole.chain]


@pytest.mark.slow
def test_a_schedule_is_that_of_drawn_lengths_and_latencies(
    project: Project, tmp_path: Path, jittery: list[str]
) -> None:
    """As above, with the groups of another order; and what was on its way to its end goes on to it."""
    plain = train_in(tmp_path / "plain", project.config(*jittery))
    with virtual_clock(LONG_TAIL):
        whole = train_in(tmp_path / "whole", project.config(*jittery))
        check_bound(whole, 1)
        again = train_in(tmp_path / "again", project.config(*jittery))
        assert [print_.chain for print_ in again.chain] == [print_.chain for print_ in whole.chain]
        assert order_of(again.folder) == order_of(whole.folder) != order_of(plain.folder)
        took = [sum(numbers[CLOCK_STEPS] for numbers in run.steps) for run in (plain, whole, again)]
        assert 5 <= took[0] < took[1] == took[2], "longer answers take more of its steps"
        files = whole.folder.glob(f"checkpoints/*/{IN_PLAY}")
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        assert any(steps for line in lines for steps in line["steps_left"].values()), "not all at its end"
        for step in (1, 2, 3, 4):
            folder = cut_after(whole.folder, tmp_path / f"cut-{step}", step=step)
            rest = resume_in(folder)
            check_records(folder, num_steps=5)
            assert [print_.chain for print_ in rest.chain] == [print_.chain for print_ in whole.chain], step


def order_of(folder: Path) -> list[list[str]]:
    """The groups that each step looked at, in that order."""
    with RunFolder.open(folder, read_only=True) as run:
        return [list(event["ended"]) for event in run.events.read("schedule")]


def test_a_group_whose_scorer_is_slow_comes_later(project: Project, tmp_path: Path) -> None:
    """Every sample takes as long, but for one in 16 that takes far longer: its group is what a step does not wait for
    until it has to."""
    drawn = Delays(seed=0, latencies=Distribution(recorded=(1.0,) * 15 + (500.0,)))
    with virtual_clock(drawn):
        done = train_in(tmp_path / "run", project.config(*AHEAD, *FEW, "data.val_files=[]"))
    slow = {
        report.uid: record.step
        for record in done.records
        for report in record.reports
        if drawn.steps_after(report.uid, int(report.id.rpartition("/")[2]), 8) > 1
    }
    last = {uid: max(number // 4, 1) + 1 for number, uid in enumerate(issued(done.folder))}
    assert 0 < len(slow) < 16
    assert slow == {uid: last[uid] for uid in slow}, "as late as the bound allows"
    assert any(slow.get(uid, 0) > 1 for uid in list(last)[:4]), (
        "a step went on without the group it began with"
    )


def issued(folder: Path) -> list[str]:
    """Prompts, in the order in which they were begun."""
    with RunFolder.open(folder, read_only=True) as run:
        return list(dict.fromkeys(uid for event in run.events.read("issued") for uid in event["samples"]))


@pytest.mark.usefixtures("rewards_are_tried")
def test_scores_are_kept_over_an_interruption(project: Project, tmp_path: Path) -> None:
    step = 2
    counted, asked = tmp_path / "counted.py", tmp_path / "asked.txt"
    counted.write_text(COUNTED.format(path=str(asked)))
    settings = [*VIRTUAL, f"run.save_every={step}", f"reward.path='{counted}'", "data.val_files=[]"]
    settings.append("data.max_response_tokens=12")
    whole = train_in(tmp_path / "whole", project.config(*settings))
    folder = cut_after(whole.folder, tmp_path / "cut", step=step)
    [checkpoint] = folder.glob(f"checkpoints/*{step}/{IN_PLAY}")
    known = {f"{one.uid}/{number}" for one in read_in_play(checkpoint).values() for number in one.kept.scores}
    assert known, "some were scored"
    asked.unlink()
    rest = resume_in(folder)
    assert any(f"and {len(known)} scores that they had" in line for line in rest.said)
    later = {report.id for record in whole.records[step:] for report in record.reports}
    num_probes = 4  # before the first step of a start
    assert len(asked.read_text().splitlines()) - num_probes == len(later - known) < len(later)
    assert [print_.chain for print_ in rest.chain] == [print_.chain for print_ in whole.chain]
