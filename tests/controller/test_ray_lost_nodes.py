"""A node that is lost with rows of calls that have ended: its processes had nothing to do, so that no call tells it."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_ray_drivers import GROUP, run

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

PROGRAM = (
    GROUP
    + """
from ray.cluster_utils import Cluster as SeveralNodes
from contextlib import suppress
from strop.controller import WorkerFailed
from strop.controller.ray import manager

is_elastic, is_read_here = "elastic" in sys.argv[2:], "here" in sys.argv[2:]
nodes = SeveralNodes(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
size = {"num_cpus": 2, "object_store_memory": 80_000_000}
places = {address: nodes.add_node(node_ip_address=address, **size) for address in ("127.0.0.2", "127.0.0.3")}
options = {"cpus_per_rank": 1, "address": nodes.address, "log_dir": Path(sys.argv[1]), "call_timeout_s": 60}
runtime = RayRuntime(ranks=2, apart={"rollout": 2}, nodes=2, **options)
actor = runtime.groups({"actor": role(Doubler)})["actor"]
rollout = runtime.groups({"rollout": role(Doubler)}, pool="rollout", is_elastic=is_elastic)["rollout"]
# More than Ray sends along with an answer.
rows = rollout.call.add_columns(batch(400)).wait()
manager._PING_S = 1000.0  # else a question whether all live may happen to be under way
lost = rollout.members[1].node.address
nodes.remove_node(places[lost], allow_graceful=False)
try:
    rows.get() if is_read_here else actor.call.sum_on_first(rows)
    tell(error="")
except WorkerFailed as error:
    tell(error=type(error).__name__, has_died=error.has_died, text=str(error), lost=lost)
with suppress(WorkerFailed):  # a rank of the actor was there too
    runtime.close()
nodes.shutdown()
"""
)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("elastic here", "RankLost"),
        ("elastic there", "RankFailed"),
        ("fixed here", "RankFailed"),
        ("fixed there", "RankFailed"),
    ],
)
def test_reading_its_rows_says_that_its_process_has_died(tmp_path: Path, how: str, error: str) -> None:
    facts = run(PROGRAM, str(tmp_path), *how.split())
    assert facts["error"] == error, facts
    assert facts["has_died"], facts
    assert facts["text"].removeprefix("first failure: ").startswith(("rollout rank 1 ", "actor rank 1 "))
    assert f"(node {facts['lost']}, " in facts["text"].partition("\n")[0]
