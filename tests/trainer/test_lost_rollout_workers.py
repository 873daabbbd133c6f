"""Rollout workers apart that die while a run goes on: the others play what they played, and others replace them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from test_ahead_runs import AHEAD, FEW, trained
from test_ray_runs import RAY, worker_processes
from tiny_runs import Project, check_records

from strop.controller.ray.elastic import ElasticGroup
from strop.observability.trackers.setup import read_metrics
from strop.run import RunFolder
from strop.trainer.callbacks import Callbacks
from strop.trainer.config import Config
from strop.trainer.remote_weight_sync import RemoteWeightSync
from strop.trainer.start import start_run
from strop.trainer.train import train

DEADLINE_S = 240.0
"""Longest wait for what a run is to come to."""
APART = [
    *RAY, "resources.apart={rollout: 2}", "model.dtype=float64", "resources.num_threads=1", "data.val_files=[]",
    "trainer.num_epochs=400", "trainer.max_steps=400",
]  # fmt: skip
IS_PATIENT = pytest.mark.timeout(900)
"""Each start of worker processes takes up to a minute of a busy machine."""
NAMES = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean")


class EndAfter(Callbacks):
    """Ends a run two steps after a condition holds."""

    def __init__(self, holds: Callable[[RunFolder, int], bool]) -> None:
        self._holds, self._last = holds, 0

    def on_step_end(self, run: RunFolder, step: int, metrics: Mapping[str, float]) -> str:
        if not self._last and self._holds(run, step):
            self._last = step + 2
        return "the test has seen enough" if step == self._last else ""


def slow_reward(folder: Path) -> str:
    """A setting: scores take so long that a worker can be met in the middle of a step."""
    file = folder / "slow.py"
    file.write_text(
        "import time\n\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    time.sleep(0.15)\n    return ord((solution_str or ' ')[0]) % 8 / 10\n"
    )
    return f"reward.path={file}"


def rollout_process(rank: int) -> psutil.Process:
    workers = worker_processes(psutil.Process().children(recursive=True))
    (process,) = [
        worker
        for worker in workers
        if worker.environ().get("WG_PREFIX") == "rollout" and worker.environ()["RANK"] == str(rank)
    ]
    return process


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come to that"
        time.sleep(0.005)


def num_steps(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def is_playing(folder: Path, rank: int) -> bool:
    """Some of the samples of this worker have ended, and some not."""
    try:
        ended, _ = (folder / "logs" / f"rollout-{rank:05d}.progress").read_text().split()
    except (OSError, ValueError):
        return False
    return 0 < int(ended) < 8


def trained_while(
    folder: Path, config: Config, disturb: Callable[[], None], callbacks: Callbacks
) -> list[str]:
    """Train while a thread does something; what was said."""
    said: list[str] = []
    thread = threading.Thread(target=disturb, daemon=True)
    with start_run(folder, config, command=["strop", "train"]).run as run:
        thread.start()
        train(config, run, say=said.append, callbacks=callbacks)
    thread.join()
    return said


def metrics_of(folder: Path) -> dict[int, list[float]]:
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if NAMES[0] in line]
    return {int(line["step"]): [line[name] for name in NAMES] for line in lines}


def num_workers(folder: Path) -> list[float]:
    lines = read_metrics(folder / "metrics.jsonl")
    return [line["rollout/num_workers"] for line in lines if "rollout/num_workers" in line]


def has_joined(run: RunFolder, step: int) -> bool:
    return bool(run.events.read("rollout_worker_joined"))


@pytest.fixture(scope="module")
def undisturbed(project: Project, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float]]:
    """Metrics by step of a run that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = project.config(*APART, slow_reward(folder))
    trained_while(folder / "run", config, lambda: None, EndAfter(lambda run, step: step == 4))
    return metrics_of(folder / "run")


@pytest.mark.dist
@IS_PATIENT
@pytest.mark.parametrize("rank", [0, 1])
def test_the_others_play_what_it_played_and_it_is_replaced(
    project: Project, tmp_path: Path, undisturbed: dict[int, list[float]], rank: int
) -> None:
    """It dies in the middle of its share of the third step; keyed samples are the same wherever they are played."""
    folder = tmp_path / "run"

    def kill() -> None:
        wait_until(lambda: num_steps(folder) >= 2)
        process = rollout_process(rank)
        wait_until(lambda: is_playing(folder, rank))
        os.kill(process.pid, signal.SIGKILL)

    config = project.config(*APART, slow_reward(tmp_path))
    said = trained_while(folder, config, kill, EndAfter(has_joined))
    with RunFolder.open(folder, read_only=True) as run:
        assert not run.events.read("restarted")
        assert not run.events.read("crashed")
        (lost,) = run.events.read("rollout_worker_lost")
        (joined,) = run.events.read("rollout_worker_joined")
        last = run.events.read("finished")[-1]["step"]
        assert sorted(run.samples.read(last), key=lambda row: str(row["id"])), (
            "every sample of the step is stored"
        )
        assert [len(run.samples.read(step)) for step in range(1, last + 1)] == [16] * last
    assert f"rollout rank {rank} " in lost["message"]
    assert "was killed by SIGKILL during run_episodes" in lost["message"]
    assert "1 of 2 rollout workers go on" in lost["message"]
    assert joined["step"] > lost["step"] == 3
    assert any("1 of 2 rollout workers go on" in line for line in said), said
    assert any("joins: 2 of 2 rollout workers" in line for line in said), said
    check_records(folder, num_steps=last)
    counts = num_workers(folder)
    assert counts[0] == counts[1] == 2
    assert counts[2] == 1, "while it is away"
    assert counts[-1] == 2
    ours = metrics_of(folder)
    for step in undisturbed:
        assert ours[step] == pytest.approx(undisturbed[step], rel=1e-7, abs=1e-9), step


@pytest.mark.dist
@IS_PATIENT
def test_one_that_dies_in_a_weight_sync_costs_a_second_sync(
    project: Project, tmp_path: Path, undisturbed: dict[int, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still when the sync of the third step begins, so that all wait for it, and is killed then."""
    folder, versions = tmp_path / "run", list[int]()
    send_once, check = RemoteWeightSync._send_once, ElasticGroup.check

    def send(sync: RemoteWeightSync) -> str:
        versions.append(sync.version)
        return send_once(sync)

    def check_and_stop(group: ElasticGroup) -> None:  # type: ignore[type-arg]
        check(group)
        if versions[-1:] == [3] and versions.count(3) == 1 and len(group.pids) == 2:
            process = rollout_process(1)
            process.suspend()
            threading.Timer(2.0, process.kill).start()

    monkeypatch.setattr(RemoteWeightSync, "_send_once", send)
    monkeypatch.setattr(ElasticGroup, "check", check_and_stop)
    config = project.config(*APART, slow_reward(tmp_path))
    trained_while(folder, config, lambda: None, EndAfter(has_joined))
    with RunFolder.open(folder, read_only=True) as run:
        assert not run.events.read("restarted")
        (lost,) = run.events.read("rollout_worker_lost")
        last = run.events.read("finished")[-1]["step"]
        assert [len(run.samples.read(step)) for step in range(1, last + 1)] == [16] * last, (
            "its rows were kept"
        )
    assert "was killed by SIGKILL during receive_weights" in lost["message"]
    assert versions.count(3) == 2
    check_records(folder, num_steps=last)
    ours = metrics_of(folder)
    for step in undisturbed:
        assert ours[step] == pytest.approx(undisturbed[step], rel=1e-7, abs=1e-9), step


@pytest.mark.dist
@IS_PATIENT
def test_ahead_of_training_its_groups_begin_again_and_each_is_trained_once(
    project: Project, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    def kill() -> None:
        wait_until(lambda: num_steps(folder) >= 2)
        rollout_process(1).kill()

    config = project.config(*AHEAD, *FEW, *APART, "rollout.max_staleness=2", slow_reward(tmp_path))
    said = trained_while(folder, config, kill, EndAfter(has_joined))
    with RunFolder.open(folder, read_only=True) as run:
        assert not run.events.read("restarted")
        assert len(run.events.read("rollout_worker_lost")) == 1, said
        last = run.events.read("finished")[-1]["step"]
        run.ledger.check()
    assert num_workers(folder)[-1] == 2
    counts = trained(folder)
    assert set(counts.values()) == {1}
    assert len(counts) == 4 * last


@pytest.mark.dist
@IS_PATIENT
def test_without_the_last_one_the_run_begins_again(project: Project, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def kill() -> None:
        wait_until(lambda: num_steps(folder) >= 2)
        for process in (rollout_process(0), rollout_process(1)):
            process.kill()

    def has_restarted(run: RunFolder, step: int) -> bool:
        return bool(run.events.read("restarted"))

    config = project.config(*APART, "run.save_every=1", slow_reward(tmp_path))
    trained_while(folder, config, kill, EndAfter(has_restarted))
    with RunFolder.open(folder, read_only=True) as run:
        assert len(run.events.read("restarted")) == 1
        last = run.events.read("finished")[-1]["step"]
    check_records(folder, num_steps=last)
    assert num_workers(folder)[-1] == 2
