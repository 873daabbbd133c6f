"""The Ray runtime: workers in processes of their own, on one machine or on many.

cluster     the cluster, private or existing, and its nodes
pool        places for processes on it
transport   batches and tensors in the object store
messages    what controller and processes say to each other
process     a worker process (an actor): the workers of its roles
launcher    the parent of a worker process, which sees how it ends
private     folder, token and signals of a private cluster
reaper      a process that ends what a private cluster leaves behind
members     worker processes and their calls, as the controller keeps them
manager     the processes that stand and fall together; the only place where the controller waits
errors      how workers fail, in words
failures    which failure came first
start       processes and workers are made
pending     results that workers hold
future      batches of them, handed on by reference: DataProtoFuture
group       the workers of a role as a worker group
detached    groups that outlive their controller, and how another one finds them
runtime     RayRuntime: pools and their groups
joining     the runtime as `resources` asks for it
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
        "strop.controller.verl_groups": "ColocatedClass RayClassWithInitArgs RayWorkerGroup create_colocated_worker_cls",
    },
)
