"""A run whose generation is ahead of training, killed at many moments: it goes on as if nothing had been.

`make kills` does it 200 times; KILLS=20 says another number, and STROP_KILLS without make.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from test_ahead_runs import AHEAD, FEW, STILL, check_bound, lengths, trained
from test_kill_and_resume import Processes, events_of, processes
from test_ray_runs import RAY
from tiny_runs import Project, chain_of, check_records, train_in
from virtual_clock import LONG_TAIL, virtual_clock

from strop.config import save_config

__all__ = ["processes"]

DEADLINE_S = 600.0
"""Longest wait for a process to come to the place where it is killed: of a machine that is busy otherwise."""
TO_THE_END = 1_000_000
"""More records than a run has."""
NUM_STEPS = 8
NUM_KILLS = int(os.environ.get("STROP_KILLS", "20"))
SETTINGS = [
    *AHEAD, *FEW, "rollout.max_staleness=2", f"trainer.max_steps={NUM_STEPS}",
    "run.save_every=1", "eval.every=3", "data.val_files=[]",
]  # fmt: skip


def killed(process: subprocess.Popen[str], folder: Path, num_events: int, delay_s: float) -> bool:
    """Kill it so many seconds after so many records of its own; False where it has ended before."""
    before, deadline = len(events_of(folder)), time.monotonic() + DEADLINE_S
    while len(events_of(folder)) < before + num_events and process.poll() is None:
        assert time.monotonic() < deadline, "it does nothing"
        time.sleep(0.01)
    ended = process.poll() is not None  # what it said may still be on its way when the delay is over
    try:
        _, said = process.communicate(timeout=10 if ended else delay_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=10)
        return True
    assert process.returncode == 0, said
    return False


def kill_and_resume(
    project: Project,
    tmp_path: Path,
    processes: Processes,
    settings: Sequence[str],
    check: Callable[[Path], None],
    *,
    kills: int = NUM_KILLS,
) -> None:
    """Runs of these settings that are killed so many times in all, each checked at its end."""
    file = tmp_path / "run.yaml"
    save_config(project.config(*settings), file)
    rng, num_kills, num_runs = random.Random(14), 0, 0
    while num_kills < kills:
        num_runs += 1
        folder = tmp_path / f"run-{num_runs}"
        words: tuple[object, ...] = ("--config", file, "--out", folder)
        while True:
            num_events = rng.randrange(1, 24) if num_kills < kills else TO_THE_END
            if not killed(processes.start("train", *words), folder, num_events, rng.uniform(0.0, 0.2)):
                break
            num_kills += 1
            if (folder / "config.yaml").exists():
                words = ("--resume", folder)
            else:  # it never began
                shutil.rmtree(folder)
        check_records(folder, num_steps=NUM_STEPS)
        assert set(trained(folder).values()) == {1}
        check(folder)
        with (tmp_path / "progress.txt").open("a") as progress:
            progress.write(f"{num_kills} kills, {num_runs} runs that ended as they should\n")


@pytest.mark.slow
@pytest.mark.timeout(120 + 40 * NUM_KILLS)
def test_it_is_the_run_that_was_never_killed(project: Project, tmp_path: Path, processes: Processes) -> None:
    settings = [*SETTINGS]
    processes.module = "virtual_clock"
    with virtual_clock(LONG_TAIL):
        whole = train_in(tmp_path / "whole", project.config(*settings))
    check_bound(whole, 2)

    def check(folder: Path) -> None:
        assert [one.chain for one in chain_of(folder)] == [one.chain for one in whole.chain]
        assert trained(folder) == trained(whole.folder)

    kill_and_resume(project, tmp_path, processes, settings, check)


@pytest.mark.slow
@pytest.mark.timeout(120 + 40 * NUM_KILLS)
def test_by_the_clock_on_the_wall_nothing_is_lost_repeated_or_favoured(
    project: Project, tmp_path: Path, processes: Processes
) -> None:
    settings = [*SETTINGS, *STILL]
    whole = train_in(tmp_path / "whole", project.config(*settings))
    expected = lengths(whole.folder)
    assert len(set(expected.values())) > 5, "they differ"

    def check(folder: Path) -> None:
        assert lengths(folder) == expected

    kill_and_resume(project, tmp_path, processes, settings, check)


@pytest.mark.dist
@pytest.mark.timeout(300 + 30 * NUM_KILLS)
def test_with_several_processes_nothing_is_lost_repeated_or_favoured(
    project: Project, tmp_path: Path, processes: Processes
) -> None:
    """The controller is killed; its workers end by themselves."""
    apart = ["resources.apart={rollout: 1}", "resources.cpus_per_rank=0.5"]
    settings = [*SETTINGS, *STILL, *RAY, *apart]
    whole = train_in(tmp_path / "whole", project.config(*settings))
    expected = lengths(whole.folder)

    def check(folder: Path) -> None:
        assert lengths(folder) == expected

    kill_and_resume(project, tmp_path, processes, settings, check, kills=max(3, NUM_KILLS // 20))
