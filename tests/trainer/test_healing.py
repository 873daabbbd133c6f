"""Runs whose worker processes die, and that go on by themselves."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from test_ahead_runs import AHEAD, FEW, trained
from test_ray_runs import RAY, worker_processes
from tiny_runs import Done, Project, chain_of, check_records, train_in

from strop.controller import CallTimeout, WorkerFailed
from strop.controller.errors import PlacesNotFree
from strop.controller.ray.errors import Failure, RankFailed
from strop.run import RunFolder
from strop.trainer.config import Config
from strop.trainer.fault_tolerance.elastic import MoreMachines
from strop.trainer.fault_tolerance.healing import Recovery
from strop.trainer.start import start_run
from strop.trainer.train import train

SAVED = ["run.save_every=1", "run.keep_last=9", "data.val_files=[]"]


def lost(**fields: object) -> WorkerFailed:
    return RankFailed(Failure(role="actor", rank=0, node="here", pid=7, method="update", **fields))  # type: ignore[arg-type]


def recovery_of(project: Project, folder: Path, *settings: str) -> tuple[Recovery, RunFolder, list[str]]:
    said: list[str] = []
    config = project.config(*settings)
    run = start_run(folder, config, command=["strop", "train"]).run
    return Recovery(config, run, step=0, say=said.append), run, said


def test_a_run_begins_again_so_often_and_then_ends(project: Project, tmp_path: Path) -> None:
    recovery, run, said = recovery_of(project, tmp_path / "run", "run.max_restarts=2")
    with run:
        died = lost(exit_signal="SIGKILL")
        assert recovery.roll_back(died) is None, "from the beginning: nothing was saved"
        assert recovery.roll_back(CallTimeout("rank 1 has not answered", method="x", missing=[1])) is None
        with pytest.raises(WorkerFailed, match="was killed by SIGKILL"):
            recovery.roll_back(died)
        assert [event["number"] for event in run.events.read("restarted")] == [1, 2]
    assert (
        "was killed by SIGKILL during update; the workers are made again (1 of run.max_restarts=2)" in said[0]
    )


def test_an_error_that_a_worker_raised_would_only_happen_again(project: Project, tmp_path: Path) -> None:
    recovery, run, _ = recovery_of(project, tmp_path / "run")
    with run, pytest.raises(WorkerFailed, match="raised ValueError"):
        recovery.roll_back(lost(exception_type="ValueError", message="no"))


def test_where_more_machines_are_not_free_yet_they_are_counted_again(
    project: Project, tmp_path: Path
) -> None:
    places = PlacesNotFree("2 of 3 processes were placed; others hold the rest")
    elastic = ("resources.runtime=ray", "resources.ranks=2", "resources.nodes=2", "resources.min_nodes=1")
    recovery, run, said = recovery_of(project, tmp_path / "run", *elastic)
    with run:
        with pytest.raises(PlacesNotFree):
            recovery.place_again(places)  # a run that has never been placed
        recovery.take_more(MoreMachines("2 machines are there"))
        recovery.place_again(places)
    assert "2 of 3 processes were placed; the machines are counted again" in said


def killed_while(
    folder: Path, config: Config, kill: Callable[[list[psutil.Process]], None], *, after: int
) -> list[str]:
    """Train, and kill worker processes once so many steps are saved; what was said."""
    said: list[str] = []

    def watch() -> None:
        while len(list((folder / "checkpoints").glob("global_step_*/manifest.json"))) < after:
            time.sleep(0.02)
        kill(worker_processes(psutil.Process().children(recursive=True)))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    with start_run(folder, config, command=["strop", "train"]).run as run:
        train(config, run, say=said.append)
    thread.join()
    return said


TWO_RANKS = [*RAY, *SAVED, "resources.ranks=2", "trainer.max_steps=4", "resources.call_timeout_s=15"]
IS_PATIENT = pytest.mark.timeout(900)
"""Each start of worker processes takes up to a minute of a busy machine, and there are several."""


@pytest.fixture(scope="module")
def undisturbed(project: Project, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run on two ranks that nothing happens to."""
    return train_in(tmp_path_factory.mktemp("undisturbed") / "run", project.config(*TWO_RANKS))


@pytest.mark.dist
@IS_PATIENT
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_rank_that_dies_or_hangs_is_made_again_and_the_run_is_the_same(
    project: Project, tmp_path: Path, undisturbed: Done, how: signal.Signals
) -> None:
    folder = tmp_path / "run"
    said = killed_while(
        folder, project.config(*TWO_RANKS), lambda workers: os.kill(workers[-1].pid, how), after=1
    )
    with RunFolder.open(folder, read_only=True) as run:
        (again,) = run.events.read("restarted")
        assert again["step"] >= 1
        assert ("not answered within 15 s" in again["cause"]) == (how is signal.SIGSTOP)
    assert any("the workers are made again (1 of run.max_restarts=2)" in line for line in said), said
    check_records(folder, num_steps=4)
    assert chain_of(folder) == undisturbed.chain


@pytest.mark.dist
@IS_PATIENT
def test_what_was_in_play_goes_on_after_a_trainer_rank_died(project: Project, tmp_path: Path) -> None:
    config = project.config(*AHEAD, *FEW, *RAY, *SAVED, "resources.apart={rollout: 1}")
    said = killed_while(
        tmp_path / "run", config, lambda workers: os.kill(workers[0].pid, signal.SIGKILL), after=2
    )
    assert any("that were in play go on" in line for line in said), said
    check_records(tmp_path / "run", num_steps=5)
    assert set(trained(tmp_path / "run").values()) == {1}


@pytest.mark.dist
@IS_PATIENT
@pytest.mark.parametrize("first", [signal.SIGKILL, signal.SIGSTOP])
def test_two_faults_at_once_are_one_rollback(project: Project, tmp_path: Path, first: signal.Signals) -> None:
    """The trainer's rank dies or hangs in the moment in which the rollout process and all that scores die."""
    apart = ["resources.apart={rollout: 1}", "resources.call_timeout_s=20"]
    config = project.config(*AHEAD, *FEW, *RAY, *SAVED, *apart)

    def kill(workers: list[psutil.Process]) -> None:
        assert len(workers) == 2
        scorers = [one for worker in workers for one in worker.children(recursive=True)]
        assert scorers
        os.kill(workers[0].pid, first)
        for one in [workers[1], *scorers]:
            os.kill(one.pid, signal.SIGKILL)

    said = killed_while(tmp_path / "run", config, kill, after=2)
    with RunFolder.open(tmp_path / "run", read_only=True) as run:
        assert len(run.events.read("restarted")) == 1
    assert any("that were in play go on" in line for line in said), said
    check_records(tmp_path / "run", num_steps=5)
    assert set(trained(tmp_path / "run").values()) == {1}


@pytest.mark.dist
@IS_PATIENT
def test_a_second_fault_while_the_first_is_mended_is_the_next_rollback(
    project: Project, tmp_path: Path
) -> None:
    """The processes that were made again are killed before they have trained a step."""
    config = project.config(*AHEAD, *FEW, *RAY, *SAVED, "resources.apart={rollout: 1}")

    def kill(workers: list[psutil.Process]) -> None:
        os.kill(workers[0].pid, signal.SIGKILL)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            others = worker_processes(psutil.Process().children(recursive=True))
            fresh = [one for one in others if one.pid not in {worker.pid for worker in workers}]
            if fresh:
                os.kill(fresh[0].pid, signal.SIGKILL)
                return
            time.sleep(0.02)

    killed_while(tmp_path / "run", config, kill, after=2)
    with RunFolder.open(tmp_path / "run", read_only=True) as run:
        assert [event["number"] for event in run.events.read("restarted")][:2] == [1, 2]
    check_records(tmp_path / "run", num_steps=5)
    assert set(trained(tmp_path / "run").values()) == {1}
