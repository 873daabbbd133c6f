"""Groups that go on without workers whose processes are lost, and replace them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from ray_cluster import shared_cluster
from ray_workers import CPUS, Doubler, Mortal, batch

from strop.controller import Mesh, WorkerFailed, WorkerGroup, WorkerLost, role
from strop.controller.ray import RayRuntime
from strop.controller.ray.elastic import ElasticGroup
from strop.controller.ray.group import RoleGroup
from strop.trainer.fault_tolerance.rollout_workers import RolloutWorkers

pytestmark = pytest.mark.timeout(400)


class Stage(NamedTuple):
    """An actor, and three workers apart that may be lost."""

    actor: WorkerGroup[Doubler]
    group: ElasticGroup[Mortal]
    refuses: Path
    """While it exists, no worker can be made."""


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    shared_cluster()
    refuses = tmp_path / "refuses"
    with RayRuntime(ranks=1, apart={"rollout": 3}, cpus_per_rank=CPUS, log_dir=tmp_path / "logs") as runtime:
        actor = runtime.groups({"actor": role(Doubler)})["actor"]
        (group,) = runtime.groups(
            {"rollout": role(Mortal, refuses)}, pool="rollout", is_elastic=True
        ).values()
        assert isinstance(group, ElasticGroup)
        yield Stage(actor, group, refuses)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[ElasticGroup[Mortal]]:
    """Two workers and nothing beside them: each takes seconds of a core to start."""
    shared_cluster()
    with RayRuntime(ranks=1, apart={"rollout": 2}, cpus_per_rank=CPUS, log_dir=tmp_path / "logs") as runtime:
        spec = role(Mortal, tmp_path / "refuses")
        (group,) = runtime.groups({"rollout": spec}, pool="rollout", is_elastic=True).values()
        assert isinstance(group, ElasticGroup)
        yield group


def replaced(group: ElasticGroup[Mortal], rank: int) -> RoleGroup[Mortal]:
    """Start a worker of this rank, and wait until it has come up."""
    group.start_replacement(rank)
    assert rank not in group.missing, "it is on its way"
    deadline = time.monotonic() + 120
    while (newcomers := group.take_started()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return newcomers


@pytest.mark.dist
def test_the_result_is_that_of_the_others_and_what_it_gave_before_stays(stage: Stage) -> None:
    group, rows = stage.group, batch(6)
    before = group.call.part(rows)
    before.wait()
    rest = group.call.part(rows, dies=[1]).wait()
    assert len(rest) == 4, "two of six rows were those of worker 1"
    assert rest.get().tensors()["heavy"][:, 0].tolist() == [0.0, 1024.0, 2.0, 1026.0]
    (lost,) = group.pop_losses()
    assert (lost.failure.rank, lost.failure.exit_signal, lost.was_starting) == (1, "SIGKILL", False)
    assert lost.has_died
    assert group.pop_losses() == [], "each is told once"
    assert (group.mesh, group.ranks, group.missing) == (Mesh(dp=2), [0, 2], [1])
    sums = stage.actor.call.sum_heavy(before).tensors()["sums"]
    expected = before.get().tensors()["heavy"].sum(1)
    torch.testing.assert_close(sums, expected)
    assert expected[2] == float(torch.arange(1024).sum() + 1024), "a row of worker 1"
    again = group.call.part(rows).get().tensors()["heavy"]
    assert again[:, 0].tolist() == [0.0, 1024.0, 2048.0, 2.0, 1026.0, 2050.0], "three rows each"


@pytest.mark.dist
def test_a_call_that_needs_all_rows_says_who_was_lost_and_can_be_made_again(stage: Stage) -> None:
    rows = batch(6)
    with pytest.raises(WorkerLost, match=r"^rollout rank 2 .* was killed by SIGKILL during whole"):
        stage.group.call.whole(rows, dies=[2]).wait()
    assert len(stage.group.call.whole(rows).get()) == 6
    assert stage.group.call.rank_of() == [0, 1]
    assert stage.group.call.rank_of(dies=[0]) == [1], "each speaks for itself"
    assert len(stage.actor.call.double(rows)) == 6, "nobody else is concerned"


def test_another_process_takes_its_place(pair: ElasticGroup[Mortal]) -> None:
    group, pids = pair, pair.pids
    os.kill(pids[0], signal.SIGKILL)
    group.check()
    assert group.ranks == [1], "also of one that had no call"
    newcomers = replaced(group, 0)
    assert group.ranks == [1], "it joins when it is told to"
    assert newcomers.call.rank_of() == [0]
    group.add(newcomers)
    assert (group.ranks, group.missing, group.mesh) == ([0, 1], [], Mesh(dp=2))
    assert group.pids[1:] == pids[1:]
    assert group.pids[0] not in pids
    counts = [int(number) for number in group.call.part(batch(6)).get().tensors()["heavy"][:, 0]]
    assert counts == [0, 1024, 2048, 1, 1025, 2049]
    os.kill(group.pids[0], signal.SIGKILL)
    group.check()
    assert group.ranks == [1], "it may be lost in its turn"


@pytest.mark.dist
def test_a_lost_one_is_replaced_once(stage: Stage) -> None:
    group = stage.group
    workers = RolloutWorkers(cast(Any, group), max_losses=2, step=1)
    os.kill(group.pids[0], signal.SIGKILL)
    deadline, num_started = time.monotonic() + 120, 0
    while group.ranks != [0, 1, 2] or not num_started:
        assert time.monotonic() < deadline
        workers.admit()
        num_started = max(num_started, len(group._starting))
        time.sleep(0.05)
    assert (num_started, group._starting, group.missing) == (1, [], [])


@pytest.mark.dist
def test_one_that_does_not_come_up_costs_nobody_else(stage: Stage) -> None:
    group = stage.group
    assert group.call.rank_of(dies=[2]) == [0, 1]
    (lost,) = group.pop_losses()
    stage.refuses.touch()
    group.start_replacement(2)
    deadline = time.monotonic() + 120
    while not (failed := group.pop_losses()):
        assert time.monotonic() < deadline
        assert group.take_started() is None
        time.sleep(0.05)
    assert failed[0].was_starting
    assert not lost.was_starting
    assert "raised ValueError: not now" in failed[0].failure.sentence()
    assert group.missing == [2]
    assert group.call.rank_of() == [0, 1]


@pytest.mark.dist
def test_one_that_hangs_while_it_starts_is_given_up_although_the_others_answer(stage: Stage) -> None:
    group = stage.group
    group.call.rank_of(dies=[2])
    group.pop_losses()
    stage.refuses.write_text("hang")
    group._options = replace(group._options, timeout_s=5)
    group.start_replacement(2)
    started_at = time.monotonic()
    while not (failed := group.pop_losses()):
        assert time.monotonic() - started_at < 60
        assert group.call.rank_of() == [0, 1]
        time.sleep(0.2)
    assert failed[0].was_starting
    assert "raised TimeoutError: it has not started within 5 s" in failed[0].failure.sentence()
    assert time.monotonic() - started_at >= 5
    assert group.call.rank_of() == [0, 1]


@pytest.mark.dist
def test_without_the_last_one_all_end_as_ever(stage: Stage) -> None:
    with pytest.raises(WorkerFailed) as raised:
        stage.group.call.rank_of(dies=[0, 1, 2])
    assert not isinstance(raised.value, WorkerLost)
    assert raised.value.has_died
    with pytest.raises(RuntimeError, match="the workers were stopped after a failure"):
        stage.actor.call.double(batch(2))


@pytest.mark.dist
def test_an_error_that_one_raises_ends_all(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(WorkerFailed, match="raised ValueError: the moon") as raised:
        stage.group.call.fail()
    assert not raised.value.has_died
    assert "Unhandled error" not in caplog.text, "it is said once"


def test_workers_that_share_rows_are_not_replaced(tmp_path: Path) -> None:
    shared_cluster()
    spec: Any = role(Mortal).on(Mesh(tp=2))
    with (
        RayRuntime(ranks=2, cpus_per_rank=CPUS, log_dir=tmp_path) as runtime,
        pytest.raises(ValueError, match="only data-parallel workers are replaced one by one"),
    ):
        runtime.groups({"rollout": spec}, is_elastic=True)
    assert list(tmp_path.iterdir()) == [], "no process was started"
