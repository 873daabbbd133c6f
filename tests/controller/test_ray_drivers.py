"""Several controllers, killed controllers and several nodes; each in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import IO, Any

import psutil
import pytest
from program_path import python_path

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROGRAM_S = 240.0
"""After this time a program is killed, so that nothing is left of a test that hangs."""

GROUP = """
import json, sys, time
from pathlib import Path
from ray_workers import Doubler, Faulty, batch
from strop.controller import as_list, role
from strop.controller.ray import *
from strop.controller.ray import RayClassWithInitArgs, RayWorkerGroup

def tell(**facts):
    print(json.dumps(facts), flush=True)
"""

DRIVER = (
    GROUP
    + """
runtime = RayRuntime(ranks=2, cpus_per_rank=0.1, log_dir=Path(sys.argv[1]))
actor = runtime.groups({"actor": role(Faulty)})["actor"]
tell(pids=actor.call.pid())
actor.call.go_wrong("sleep")
"""
)

HOST = (
    GROUP
    + """
import ray
cluster = Cluster()
tell(address=ray.get_runtime_context().gcs_address)
sys.stdin.read()
cluster.close()
"""
)

MAKER = (
    GROUP
    + """
def made(name, label):
    pool = RayResourcePool([2], name_prefix=label, cpus_per_process=0.1)
    worker = RayClassWithInitArgs(Doubler, factor=3)
    return RayWorkerGroup(pool, worker, detached=True, name=name, address=sys.argv[1])

group = made("kept", "keepers")
assert len(group.call.double(batch(5))) == 5
try:
    made("kept", "others")
except ValueError as error:
    tell(taken=str(error))
tell(places=[{key: place[key] for key in ("pid", "seen", "rank")} for place in group.call.where()])
maimed = made("maimed", "maimed")
tell(maimed=[place["pid"] for place in maimed.call.where()])
maimed.close()
group.close()
"""
)

FINDER = (
    GROUP
    + """
for name, worker in {"lost": Doubler, "maimed": Doubler, "kept": {"other": Doubler}}.items():
    try:
        RayWorkerGroup.attach(name, worker, address=sys.argv[1])
    except ValueError as error:
        tell(**{name: str(error)})
group = RayWorkerGroup.attach("kept", Doubler, address=sys.argv[1])
tell(places=[{key: place[key] for key in ("pid", "seen", "rank")} for place in group.call.where()])
tell(doubled=group.call.double(batch(2)).tensors()["doubled"].values().tolist())
group.destroy()
tell(gone=True)
"""
)

NODES = (
    GROUP
    + """
import os
os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"  # as users of other libraries have it
import ray
from ray.cluster_utils import Cluster as SeveralNodes
nodes = SeveralNodes(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2, "include_dashboard": False})
nodes.add_node(num_cpus=2, node_ip_address="127.0.0.2")
runtime = RayRuntime(ranks=3, nodes=2, address=nodes.address, log_dir=Path(sys.argv[1]), call_timeout_s=60)
actor = runtime.groups({"actor": role(Doubler)})["actor"]
here = runtime._cluster.nodes()
tell(addresses=[node.address for node in here], is_here=[node.is_here for node in here])
tell(members=[member.node.address for member in actor.members])
tell(places=[[place[key] for key in ("rank", "local_rank", "local_world_size")] for place in actor.call.where()])
tell(master=sorted({place["environment"]["MASTER_ADDR"] for place in actor.call.where()}))
tell(doubled=actor.call.double(batch(7)).tensors()["doubled"].values().tolist())
try:
    RayRuntime(ranks=6, nodes=2, address=nodes.address)
except Exception as error:
    tell(error=str(error))
runtime.close()
runtime = RayRuntime(ranks=2, nodes=2, address=nodes.address, log_dir=Path(sys.argv[1]), call_timeout_s=60)
actor = runtime.groups({"actor": role(Faulty)})["actor"]
try:
    actor.call.go_wrong("kill")
except Exception as error:
    tell(failure=str(error))
runtime.close()
assert not ray.is_initialized(), "the last runtime leaves the cluster that it joined"
ray.init(address=nodes.address, log_to_driver=False, configure_logging=False)
runtime = RayRuntime(ranks=2, device="cuda", cpus_per_rank=0.5, call_timeout_s=60)
places = runtime.groups({"actor": role(Doubler)})["actor"].call.where()
tell(devices=[place["environment"]["CUDA_VISIBLE_DEVICES"] for place in places])
runtime.close()
assert ray.is_initialized(), "a connection that is not the runtime's stays"
ray.shutdown()
nodes.shutdown()
"""
)


@contextlib.contextmanager
def program(text: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program that can import the tests' workers; ended with all it started."""
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT, HERE)}
    process = subprocess.Popen(
        [sys.executable, "-c", text, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    deadline = Timer(PROGRAM_S, end, [process])
    deadline.start()
    try:
        yield process
    finally:
        deadline.cancel()
        end(process)
        process.wait(30)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def end(process: subprocess.Popen[str]) -> None:
    """Kill a program and all it started, if it still runs."""
    if process.poll() is None:
        for member in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def told(stream: IO[str] | None) -> dict[str, Any]:
    """The next line of facts; other lines of Ray are passed over."""
    assert stream is not None
    for line in stream:
        if line.startswith("{"):
            facts: dict[str, Any] = json.loads(line)
            return facts
    raise AssertionError("the program ended without telling more")


def run(text: str, *arguments: str) -> dict[str, Any]:
    """All facts that a program tells; it must succeed and write nothing else on standard output."""
    facts: dict[str, Any] = {}
    with program(text, *arguments) as process:
        assert process.stdout is not None
        for line in process.stdout:
            assert line.startswith("{"), f"something else was printed: {line}"
            facts |= json.loads(line)
        assert process.wait() == 0
    return facts


def gone_within(seconds: float, processes: list[psutil.Process]) -> list[psutil.Process]:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_nothing_is_left_of_a_controller_that_was_killed(tmp_path: Path) -> None:
    with program(DRIVER, str(tmp_path)) as process:
        pids = told(process.stdout)["pids"]
        family = psutil.Process(process.pid).children(recursive=True)
        names = " ".join(" ".join(one.cmdline()) for one in family)
        assert set(pids) <= {one.pid for one in family}
        assert all(part in names for part in ("gcs_server", "raylet", "launcher.py", "ray::WorkerProcess"))
        time.sleep(1)  # the workers are in their method that never ends
        os.kill(process.pid, signal.SIGKILL)
        assert gone_within(20, family) == []


def test_a_detached_group_outlives_its_controller_and_is_found_by_another(tmp_path: Path) -> None:
    with program(HOST) as host:
        address = told(host.stdout)["address"]
        made = run(MAKER, address)
        assert [place["seen"] for place in made["places"]] == [[3], [2]]
        assert "kept/0" in made["taken"]
        assert all(psutil.pid_exists(place["pid"]) for place in made["places"])
        psutil.Process(made["maimed"][0]).kill()
        found = run(FINDER, address)
        assert found["lost"].startswith("there is no detached group 'lost' in namespace 'strop'")
        assert found["maimed"].startswith("of group 'maimed', process 0 is gone, so the others were ended")
        assert not any(psutil.pid_exists(pid) for pid in made["maimed"])
        assert found["kept"].startswith("group 'kept' has the roles keepers;")
        assert found["places"] == made["places"]
        assert found["doubled"] == [0, 3, 3]
        assert not any(psutil.pid_exists(place["pid"]) for place in made["places"])
        family = psutil.Process(host.pid).children(recursive=True)
        assert host.stdin is not None
        host.stdin.close()  # it reads until here
        assert host.wait(60) == 0
        assert gone_within(20, family) == []


def test_workers_are_in_the_order_of_their_nodes(tmp_path: Path) -> None:
    facts = run(NODES, str(tmp_path))
    assert len(facts["addresses"]) == 2
    assert sorted(facts["is_here"]) == [False, True], "one node is asked through Ray, as another machine is"
    assert facts["members"] == [facts["addresses"][0]] * 2 + [facts["addresses"][1]]
    assert facts["places"] == [[0, 0, 2], [1, 1, 2], [2, 0, 1]]
    assert facts["master"] == [facts["addresses"][0]]
    assert facts["doubled"] == [2 * number for number in range(7) for _ in range(number % 3 + 1)]
    assert "3 CPU on node 1; 3 CPU on node 2" in facts["error"]
    assert facts["devices"] == ["0", "1"]
    assert "actor rank 1" in facts["failure"]
    assert "was killed by SIGKILL during go_wrong" in facts["failure"]
