"""Runs ahead of training by the clock of engine steps: the order of everything follows from the seed."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_ahead_runs import AHEAD, FEW, check_bound
from test_ray_runs import cut_after
from tiny_runs import Project, check_records, resume_in, train_in

from strop.config.errors import ConfigError

VIRTUAL = [*AHEAD, *FEW, "trainer.clock=virtual", "run.save_every=1", "run.keep_last=9"]

SLOW = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(os.urandom(1)[0] / 255 * 0.02)
    return ord((solution_str or " ")[0]) % 8 / 10
"""


@pytest.fixture
def jittery(project: Project, tmp_path: Path) -> list[str]:
    """Scores that take another time in each run, in three processes."""
    (tmp_path / "slow.py").write_text(SLOW)
    return [*VIRTUAL, f"reward.path='{tmp_path / 'slow.py'}'", "reward.num_workers=3", "data.val_files=[]"]


def test_two_runs_are_the_same_to_the_bit_however_long_scoring_takes(
    project: Project, tmp_path: Path, jittery: list[str]
) -> None:
    one, two = (train_in(tmp_path / name, project.config(*jittery)) for name in ("one", "two"))
    check_bound(one, 1)
    assert [print_.chain for print_ in one.chain] == [print_.chain for print_ in two.chain]


@pytest.mark.parametrize(
    ("bound", "steps"),
    [
        (1, (2,)),
        pytest.param(1, (1, 3, 4), marks=pytest.mark.slow),
        pytest.param(2, (1, 2, 3, 4), marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_interrupted_after_any_step_is_the_one_that_was_not(
    project: Project, tmp_path: Path, jittery: list[str], bound: int, steps: tuple[int, ...]
) -> None:
    whole = train_in(tmp_path / "whole", project.config(*jittery, f"rollout.max_staleness={bound}"))
    for step in steps:
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
