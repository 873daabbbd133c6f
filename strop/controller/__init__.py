"""The single controller: worker groups that are called like one worker.

mesh          parallel axes of a group: workers with the same rows, ranks whose outputs count
worker        the base class of workers
roles         specification of a role: class, arguments and mesh
partition     a batch that its caller cut over the workers
dispatch      dispatch modes: arguments over the workers, and collection of results
registration  the mark on a worker method
call          one call of one worker, and its execution there
group         the interface of a worker group
runtime       the protocol of the inline and the Ray runtime
inline        workers in this process
errors        errors of workers in other processes
rendezvous    the meeting place of torch.distributed process groups
store_server  its store, which lets in only the processes of one group
auth_listener connections that prove who they are before anything is read
dispatch_modes  dispatch modes that users add
verl_groups   verl's names for roles and worker groups

ray/ below it (workers in processes of their own).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.controller.call import BatchAndMetrics, Returns, WorkerCall
from strop.controller.dispatch import Dispatch, DispatchMode
from strop.controller.errors import CallTimeout, PlacesNotFree, WorkerFailed, WorkerLost
from strop.controller.group import ResultFuture, WorkerGroup, as_list
from strop.controller.inline import InlineRuntime, InlineWorkerGroup
from strop.controller.mesh import Mesh
from strop.controller.partition import Partition
from strop.controller.registration import Execute, Registration, register
from strop.controller.roles import RoleSpec, meshes_on, role
from strop.controller.runtime import Runtime
from strop.controller.worker import Placement, Worker, placed
from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.controller.dispatch_modes import register_dispatch_mode
    from strop.controller.ray.errors import Failure, GroupStopped, NotEnoughDevices

__all__ = [
    "BatchAndMetrics",
    "CallTimeout",
    "Cut",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "Failure",
    "GroupStopped",
    "InlineRuntime",
    "InlineWorkerGroup",
    "Mesh",
    "NotEnoughDevices",
    "Partition",
    "Placement",
    "PlacesNotFree",
    "Registration",
    "ResultFuture",
    "Returns",
    "RoleSpec",
    "Runtime",
    "Worker",
    "WorkerCall",
    "WorkerFailed",
    "WorkerGroup",
    "WorkerLost",
    "as_list",
    "meshes_on",
    "placed",
    "register",
    "register_dispatch_mode",
    "role",
]

Cut = Partition
"""Old name."""

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".ray.errors": "Failure GroupStopped NotEnoughDevices",
        "strop.controller.dispatch_modes": "register_dispatch_mode",
    },
)
