"""Ranks over several Ray nodes of this machine: a leader, and a follower on each other node."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_ray_drivers import GROUP, run

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

PROGRAM = (
    GROUP
    + """
import os, signal
import psutil
from ray.cluster_utils import Cluster as SeveralNodes
from ray_workers import Companion, Spanning
from strop.controller.roles import RankDevices

sizes = {"num_cpus": 1, "object_store_memory": 80_000_000}
nodes = SeveralNodes(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
for number in range(2, 6):
    nodes.add_node(node_ip_address=f"127.0.0.{number}", **sizes)
# Nodes of two devices each, by their cores; a rank of four takes two of them.
options = {"ranks": 1, "cpus_per_rank": 0.5, "address": nodes.address, "log_dir": Path(sys.argv[1])}
devices = {"rollout": RankDevices(count=4, over_nodes=True)}
try:
    RayRuntime(apart={"rollout": 1}, devices={"rollout": RankDevices(count=3, over_nodes=True)}, **options)
except ValueError as error:
    tell(refused=str(error))
runtime = RayRuntime(apart={"rollout": 2}, devices=devices, call_timeout_s=60, **options)
try:
    runtime.groups({"rollout": role(Spanning)}, pool="rollout")
except ValueError as error:
    tell(alone=str(error))
actor = runtime.groups({"actor": role(Doubler)})["actor"]
spec = role(Spanning).followed_by(role(Companion))
group = runtime.groups({"rollout": spec}, pool="rollout", is_elastic=True)["rollout"]
tell(trainer=actor.members[0].node.address, where=group.call.where())
tell(logs=sorted(path.name for path in Path(sys.argv[1]).glob("*.log")))

def lives(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

def replaced(rank):
    group.start_replacement(rank)
    while (newcomers := group.take_started()) is None:
        time.sleep(0.1)
    group.add(newcomers)

pids = [[pid for _, pid in rank] for rank in group.call.where()]
os.kill(pids[1][1], signal.SIGKILL)
group.check()
while lives(pids[1][0]):  # the leader ends with its follower
    time.sleep(0.05)
(loss,) = group.pop_losses()
tell(left=group.ranks, loss=loss.failure.sentence())
replaced(1)
after = group.call.where()
tell(again=after, fresh=not {pid for _, pid in after[1]} & set(pids[1]))
answers = group.call.lose(1)
(loss,) = group.pop_losses()
tell(answers=answers, lost=loss.failure.sentence())
while any(lives(pid) for _, pid in after[1]):
    time.sleep(0.05)
tell(kept=group.ranks, works=group.call.lose(1), doubled=len(actor.call.double(batch(2))))
runtime.close()
while any(lives(pid) for pid in pids[0]):
    time.sleep(0.05)
tell(ended=True)
nodes.shutdown()
"""
)


def test_a_rank_over_two_nodes_lives_and_ends_as_one(tmp_path: Path) -> None:
    facts = run(PROGRAM, str(tmp_path))
    assert "needs 3 devices, and the largest node has 2" in facts["refused"]
    assert facts["alone"] == "a rank of pool 'rollout' spans 2 nodes, and role 'rollout' has no followers"
    used = [address for rank in facts["where"] for address, _ in rank]
    assert len({facts["trainer"], *used}) == 5, "no node is shared"
    assert {"rollout-0.log", "rollout-0-node1.log", "rollout-1-node1.log"} <= set(facts["logs"])
    assert facts["left"] == [0]
    assert facts["loss"].startswith("rollout rank 1 ")
    assert "was killed by SIGKILL" in facts["loss"]
    assert facts["fresh"]
    assert [address for address, _ in facts["again"][1]] == [address for address, _ in facts["where"][1]]
    assert "FollowerLost: the process on the other node is gone during lose" in facts["lost"]
    assert facts["answers"] == [0], "the other one speaks for itself"
    assert (facts["kept"], facts["works"], facts["doubled"]) == ([0], [0], 2)
    assert facts["ended"]
