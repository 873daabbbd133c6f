"""Runs ahead of training by the clock of engine steps: the order of everything follows from the seed."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_ahead_runs import AHEAD, FEW, check_bound
from test_ray_runs import cut_after
from tiny_runs import Done, Project, check_records, resume_in, train_in

from strop.config.errors import ConfigError
from strop.run import RunFolder
from strop.trainer.async_rollout.virtual_time import VirtualTime, read_distribution
from strop.workers.async_rollout.in_play import IN_PLAY, read_in_play

VIRTUAL = [*AHEAD, *FEW, "trainer.clock=virtual", "run.save_every=1", "run.keep_last=9"]

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


@pytest.fixture(scope="module")
def validated(project: Project, jittery: list[str], tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run with a validation after each of its three steps."""
    folder = tmp_path_factory.mktemp("validated") / "whole"
    return train_in(folder, project.config(*with_validations(jittery)))


def with_validations(jittery: list[str]) -> list[str]:
    return [*(word for word in jittery if word != NO_VALIDATION), "eval.every=1", "trainer.max_steps=3"]


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


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["resources.runtime=ray"], "but resources.runtime is ray: set resources.runtime=inline"),
        (["rollout.engine=vllm"], "but rollout.engine is vllm: set rollout.engine=native"),
    ],
)
def test_it_is_for_one_process(project: Project, given: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        project.config("trainer.clock=virtual", *given)


def test_a_run_that_is_interrupted_beside_validations_is_the_one_that_was_not(
    tmp_path: Path, validated: Done
) -> None:
    assert all(any("val-core" in name for name in numbers) for numbers in validated.steps)
    check_bound(validated, 1)
    folder = cut_after(validated.folder, tmp_path / "cut", step=1)
    rest = resume_in(folder)
    check_records(folder, num_steps=3)
    assert [print_.chain for print_ in rest.chain] == [print_.chain for print_ in validated.chain]


TIMES = ["trainer.clock_lengths='lognormal(6, 1)'", "trainer.clock_latencies='lognormal(3, 1)'"]


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_schedule_is_that_of_drawn_lengths_and_latencies(
    project: Project, tmp_path: Path, jittery: list[str], step: int
) -> None:
    """As above, with the groups of another order; and what was on its way to its end goes on to it."""
    whole = train_in(tmp_path / "whole", project.config(*jittery, *TIMES))
    check_bound(whole, 1)
    plain, again = (
        train_in(tmp_path / name, project.config(*jittery, *times))
        for name, times in (("plain", []), ("again", TIMES))
    )
    assert [print_.chain for print_ in again.chain] == [print_.chain for print_ in whole.chain]
    assert order_of(again.folder) == order_of(whole.folder) != order_of(plain.folder)
    took = [sum(one["training/off_policy/clock_steps"] for one in run.steps) for run in (plain, whole, again)]
    assert 5 <= took[0] < took[1] == took[2], "longer answers take more of its steps"
    folder = cut_after(whole.folder, tmp_path / "cut", step=step)
    [checkpoint] = folder.glob(f"checkpoints/*{step}/{IN_PLAY}")
    left = [steps for one in read_in_play(checkpoint).values() for steps in one.kept.steps_left.values()]
    assert any(left), "some had all their tokens, and not their end"
    rest = resume_in(folder)
    check_records(folder, num_steps=5)
    assert [print_.chain for print_ in rest.chain] == [print_.chain for print_ in whole.chain]


def order_of(folder: Path) -> list[list[str]]:
    """The groups that each step looked at, in that order."""
    with RunFolder.open(folder, read_only=True) as run:
        return [list(event["ended"]) for event in run.events.read("schedule")]


def test_a_group_whose_scorer_is_slow_comes_later(project: Project, tmp_path: Path) -> None:
    """Every sample takes as long, but for one in 16 that takes far longer: its group is what a step does not wait for
    until it has to."""
    (tmp_path / "steps.txt").write_text("\n".join(["1"] * 15 + ["500"]))
    times = ["trainer.clock_latencies=" + f"'{tmp_path / 'steps.txt'}'"]
    drawn = VirtualTime(seed=0, latencies=read_distribution("", str(tmp_path / "steps.txt")))
    done = train_in(tmp_path / "run", project.config(*VIRTUAL, *times, "data.val_files=[]"))
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


def test_scores_are_kept_over_an_interruption(project: Project, tmp_path: Path) -> None:
    step = 2
    counted, asked = tmp_path / "counted.py", tmp_path / "asked.txt"
    counted.write_text(COUNTED.format(path=str(asked)))
    settings = [*VIRTUAL, f"reward.path='{counted}'", "data.val_files=[]", "data.max_response_tokens=12"]
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


def test_times_are_for_this_clock(project: Project) -> None:
    with pytest.raises(ConfigError, match="trainer.clock_lengths is for a clock that counts engine steps"):
        project.config(TIMES[0])
