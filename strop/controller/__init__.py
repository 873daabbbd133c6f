"""The single controller: worker groups that are called like one worker.

mesh          parallel axes of a group: who gets the same rows, who reports
worker        the base class of workers
dispatch      how arguments reach the workers and results become one
registration  the mark on a worker method
group         the interface of a worker group
inline        workers in this process
"""

from __future__ import annotations

from strop.controller.dispatch import Dispatch, DispatchMode, register_dispatch_mode
from strop.controller.group import ResultFuture, WorkerGroup, as_future, as_list
from strop.controller.inline import InlineWorkerGroup
from strop.controller.mesh import Mesh
from strop.controller.registration import Execute, Registration, register
from strop.controller.worker import Placement, Worker, placed

__all__ = [
    "Dispatch",
    "DispatchMode",
    "Execute",
    "InlineWorkerGroup",
    "Mesh",
    "Placement",
    "Registration",
    "ResultFuture",
    "Worker",
    "WorkerGroup",
    "as_future",
    "as_list",
    "placed",
    "register",
    "register_dispatch_mode",
]
