"""What goes wrong in worker processes: the first failure is named, all of them are stopped, nothing is left."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray_cluster import shared_cluster
from ray_workers import CPUS, Doubler, Faulty, batch

from strop.controller import Failure, GroupStopped, NotEnoughDevices, WorkerCall, role
from strop.controller.errors import CallTimeout, WorkerFailed
from strop.controller.ray import RayRuntime, manager
from strop.controller.ray.failures import ObservedFailure, first_failure, is_secondary
from strop.controller.ray.launcher import ProcessEnd, process_end
from strop.controller.ray.messages import MethodRaised
from strop.controller.ray.process import WorkerProcess

pytestmark = pytest.mark.timeout(240)


@contextmanager
def two_workers(
    folder: Path, call_timeout_s: float = 120.0, **arguments: Any
) -> Iterator[tuple[RayRuntime, Any]]:
    """A runtime with two workers of role "actor"; after it none of its processes is left."""
    shared_cluster()
    before = worker_pids()
    runtime = RayRuntime(ranks=2, cpus_per_rank=CPUS, log_dir=folder, call_timeout_s=call_timeout_s)
    with runtime:
        yield runtime, runtime.groups({"actor": role(Faulty, **arguments)})["actor"]
    assert worker_pids() <= before


def worker_pids() -> set[int]:
    """Worker processes of this test process's cluster, with their parents."""
    names = ("ray::WorkerProcess", "launcher.py")
    return {
        child.pid
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and any(name in " ".join(child.cmdline()) for name in names)
    }


def test_a_killed_worker_is_named_with_its_signal_and_its_peer_is_stopped(tmp_path: Path) -> None:
    with two_workers(tmp_path, collective=True) as (runtime, actor):
        pids = actor.call.pid()
        assert actor.call.meet() == [2.0, 2.0]
        started = time.monotonic()
        with pytest.raises(WorkerFailed) as raised:
            # Rank 0 waits in a collective, sees the connection close and raises an error of its own.
            actor.call.meet("kill", after_s=0.3)
        assert time.monotonic() - started < 30
        failure = raised.value.failure
        assert (failure.role, failure.rank, failure.pid, failure.method) == ("actor", 1, pids[1], "meet")
        assert (failure.exit_signal, failure.exit_code, failure.exception_type) == ("SIGKILL", None, "")
        assert failure.node == "127.0.0.1"
        assert failure.peak_memory_bytes > 50 * 2**20
        assert failure.log_path == tmp_path / "main-1.log"
        assert failure.log_tail.endswith("rank 1 comes to the meeting")
        text = str(raised.value)
        assert text.startswith(
            f"first failure: actor rank 1 (node 127.0.0.1, pid {pids[1]}) was killed by SIGKILL during meet"
        )
        assert not any(psutil.pid_exists(pid) for pid in pids)
        with pytest.raises(GroupStopped, match="stopped after a failure .actor rank 1 .* make a new runtime"):
            actor.call.pid()
        with pytest.raises(GroupStopped, match="make a new runtime"):
            runtime.groups({"critic": role(Doubler)})


@pytest.mark.slow
def test_an_error_is_reported_with_its_traceback_while_the_peer_waits_in_a_collective(tmp_path: Path) -> None:
    with two_workers(tmp_path, collective=True) as (_, actor):
        pids = actor.call.pid()
        with pytest.raises(WorkerFailed) as raised:
            actor.call.meet("raise", after_s=0.3)
        failure = raised.value.failure
        assert (failure.rank, failure.exception_type) == (1, "ValueError")
        assert failure.message == "the moon is in the wrong place"
        assert 'in _go_wrong\n    raise ValueError("the moon' in failure.traceback
        assert "process.py" not in failure.traceback
        assert raised.value.num_later == 0
        assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
def test_a_worker_that_never_answers_hits_the_deadline_and_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its idle peer is asked for a sign of life all the time, which must not put off the deadline.
    monkeypatch.setattr(manager, "_PING_S", 0.1)
    with two_workers(tmp_path) as (_, actor):
        pids = actor.call.pid()
        actor.call_timeout_s = 1.5
        with pytest.raises(CallTimeout) as raised:
            actor.call.go_wrong("sleep")
        text = str(raised.value)
        assert text.startswith(
            f"actor.go_wrong: rank 1 (node 127.0.0.1, pid {pids[1]}) has not answered within 1.5 s; rank 0 answered"
        )
        assert (raised.value.method, raised.value.missing) == ("actor.go_wrong", (1,))
        assert "in sleep_forever" in text
        assert not any(psutil.pid_exists(pid) for pid in pids)
        with pytest.raises(GroupStopped, match="stopped after a timeout .actor.go_wrong: rank 1"):
            actor.call.pid()


@pytest.mark.slow
def test_a_failure_that_nobody_waits_for_comes_up_with_the_next_wait(tmp_path: Path) -> None:
    with two_workers(tmp_path) as (_, actor):
        actor.call.start_to_go_wrong("leave")
        with pytest.raises(WorkerFailed, match="SystemExit: I have had enough during start_to_go_wrong"):
            actor.call.go_wrong("nothing")


@pytest.mark.slow
def test_a_worker_that_dies_in_its_constructor_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed) as raised, two_workers(tmp_path, in_init="exit"):
        pass
    failure = raised.value.failure
    assert (failure.role, failure.rank, failure.exit_code, failure.method) == ("actor", 1, 3, "__init__")
    assert "actor rank 1" in str(raised.value)
    assert "ended with exit code 3 during __init__" in str(raised.value)
    assert worker_pids() == set()


def test_a_worker_that_writes_into_its_arguments_is_found_out() -> None:
    # The process as it is inside its actor, without the start of one.
    process = WorkerProcess.__new__(WorkerProcess)
    process._workers = {"actor": Faulty(), "critic": Doubler()}

    def order(role: str, method: str, *args: Any) -> tuple[str, WorkerCall]:
        return role, WorkerCall(rank=0, method=method, args=args, kwargs={})

    with pytest.raises(MethodRaised) as raised:
        process.call(*order("actor", "write_ids", batch(4)), wait_s=1)
    report = raised.value.report
    assert report.message.startswith("Faulty.write_ids wrote into column 'scores' of the batch it was given")
    with pytest.raises(MethodRaised) as raised:
        process.call(*order("actor", "add_one", torch.zeros(2)), wait_s=1)
    assert raised.value.report.message.startswith("Faulty.add_one wrote into a tensor it was given")
    assert process.call(*order("critic", "size_of", torch.ones(2)), wait_s=1).value == (2.0, False)


def test_more_than_there_is_is_refused_at_once() -> None:
    cluster = shared_cluster()
    cores = int(cluster.nodes()[0].total["CPU"])
    started = time.monotonic()
    with pytest.raises(NotEnoughDevices) as raised:
        RayRuntime(ranks=cores + 3)
    text = str(raised.value)
    assert f"asked for {cores + 3} processes of 1 CPU each (pool 'main')" in text
    assert re.search(rf"there is: node 127.0.0.1 has [\d.]+ of {cores} CPU free", text)
    assert "Lower resources.ranks, lower resources.cpus_per_rank" in text
    with pytest.raises(NotEnoughDevices, match=r"2 GPU on node 1.*node 127.0.0.1 has"):
        RayRuntime(ranks=2, cpus_per_rank=CPUS, device="cuda")
    with pytest.raises(NotEnoughDevices, match="on node 2"):
        RayRuntime(ranks=2, cpus_per_rank=CPUS, nodes=2)
    assert time.monotonic() - started < 5
    with pytest.raises(ValueError, match="pool 'aside' has 1 processes for 2 nodes"):
        RayRuntime(ranks=2, nodes=2, apart={"aside": 1})
    with pytest.raises(ValueError, match="0 cores per process; use a fraction such as 0.1"):
        RayRuntime(ranks=2, cpus_per_rank=0)


def failed(
    at: float, rank: int, kind: str = "", message: str = "", *, is_consequence: bool = False
) -> ObservedFailure:
    failure = Failure(
        role="actor", rank=rank, node="n", pid=rank, method="m", exception_type=kind, message=message, at=at
    )
    return ObservedFailure(failure=failure, is_consequence=is_consequence)


def test_the_cause_is_reported_and_not_what_followed_from_it() -> None:
    lost = failed(
        1.0, 0, "RuntimeError", "[enforce fail] gloo/transport/tcp/pair.cc: Connection closed by peer"
    )
    nccl = failed(0.5, 1, "torch.distributed.DistBackendError", "remote process exited")
    lacks = failed(0.4, 2, "ray.Error", "no argument", is_consequence=True)
    died = failed(2.0, 3)
    raised = failed(3.0, 4, "ValueError", "gloo is a kind of light")
    assert [is_secondary(one) for one in (lost, nccl, lacks, died, raised)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert first_failure([lacks, nccl, lost, raised, died]).rank == 3
    assert first_failure([lacks, nccl, lost, raised]).rank == 4
    assert first_failure([lacks, nccl, lost]).rank == 1
    assert first_failure([lacks]).rank == 2


def test_the_end_of_a_process_is_read_from_its_log() -> None:
    killed = ProcessEnd(pid=17, at=12.5, exit_signal="SIGKILL", exit_code=None, peak_memory_bytes=4096)
    ended = ProcessEnd(pid=18, at=13.0, exit_signal="", exit_code=3, peak_memory_bytes=1)
    log = f"[strop] process 17 is a liar\n{killed.line()}more\n{ended.line()}"
    assert process_end(17, log) == killed
    assert process_end(18, log) == ended
    assert process_end(1, log) is None


@pytest.mark.slow
def test_the_cluster_listens_on_loopback_only() -> None:
    shared_cluster()
    own = psutil.Process()
    listening = {
        connection.laddr.ip
        for process in [own, *own.children(recursive=True)]
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening, "the servers of the cluster were looked at"
    assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert os.environ.get("RAY_USAGE_STATS_ENABLED") is None
