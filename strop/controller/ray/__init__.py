"""The Ray runtime: workers in processes of their own, on one machine or on many.

cluster.py       The Ray cluster that worker processes run on
detached.py      Detached groups: processes that outlive their controller
elastic.py       Worker groups that go on without workers whose processes are lost, and replace them
errors.py        Errors of worker processes, in words
failures.py      Diagnosis of the first failure of a runtime
future.py        Batches whose rows stay with the workers that made them
group.py         Worker groups whose workers live in worker processes
launcher.py      Launcher of a worker process
manager.py       Manager of worker processes that fail together, and the only place where the controller waits for them
members.py       Handles of worker processes and their calls, in the controller
messages.py      Messages between the controller and a worker process
node_choice.py   Nodes of a Ray cluster that have what resource pools need
pending.py       Results that worker processes still hold
pool.py          Resource pools of worker processes on a Ray cluster
private.py       Isolation of a private cluster
process.py       A worker process
reaper.py        Reaper of a private cluster
resource_text.py Resources of nodes and of places, in words
runtime.py       The Ray runtime
start.py         Start of the processes of a pool, and construction of the workers in them
transport.py     Transport of batches and tensors through Ray's object store
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    import ray as _ray  # noqa: F401  asked for here, so that its absence is explained once
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ModuleNotFoundError(
        "the Ray runtime needs the package ray: pip install 'strop[ray]', or use resources.runtime=inline",
        name="ray",
    ) from None

from strop.controller.ray.cluster import Cluster, Node
from strop.controller.ray.group import RoleGroup
from strop.controller.ray.pending import RayPending, Traffic
from strop.controller.ray.pool import RayResourcePool
from strop.controller.ray.runtime import RayRuntime
from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.controller.verl_groups import (
        ColocatedClass,
        RayClassWithInitArgs,
        RayWorkerGroup,
        create_colocated_worker_cls,
    )

__all__ = [
    "Cluster",
    "ColocatedClass",
    "Node",
    "RayClassWithInitArgs",
    "RayPending",
    "RayResourcePool",
    "RayRuntime",
    "RayWorkerGroup",
    "RoleGroup",
    "Traffic",
    "create_colocated_worker_cls",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "strop.controller.verl_groups": "ColocatedClass RayClassWithInitArgs RayWorkerGroup "
        "create_colocated_worker_cls",
    },
)
