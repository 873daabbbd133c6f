"""A clock on the wall that jumps while a run goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from test_ahead_runs import AHEAD, FEW, trained
from tiny_runs import Project, check_records, train_in

from strop.observability.viewer.postmortem import look_into

DAY_S = 86400.0


@pytest.mark.usefixtures("engine_clock")
@pytest.mark.parametrize("jump_s", [DAY_S, pytest.param(-DAY_S, marks=pytest.mark.slow)])
def test_a_run_is_the_same_and_nothing_ends_before_its_time(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """By a day each time it is looked at."""
    config = project.config(
        *AHEAD,
        *FEW,
        "trainer.max_steps=3",
        "trainer.max_hours=1",
        "run.save_every=1",
    )
    calm = train_in(tmp_path / "calm", config)
    now, num_asked = time.time, 0

    def jumping() -> float:
        nonlocal num_asked
        num_asked += 1
        return now() + num_asked * jump_s

    monkeypatch.setattr(time, "time", jumping)
    wild = train_in(tmp_path / "wild", config)
    assert num_asked > 10, "it was looked at"
    assert [one.chain for one in wild.chain] == [one.chain for one in calm.chain]
    check_records(wild.folder, num_steps=3)
    assert set(trained(wild.folder).values()) == {1}
    assert all(0 <= numbers["timing_s/step"] < 600 for numbers in wild.steps)
    assert look_into(wild.folder).state == "is finished"
