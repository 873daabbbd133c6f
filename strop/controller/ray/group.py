"""Worker groups whose workers live in worker processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import ray

from strop.controller.call import BatchAndMetrics, Pending, WorkerCall
from strop.controller.group import WorkerGroup
from strop.controller.mesh import Mesh
from strop.controller.partition import Partition
from strop.controller.ray.future import DataProtoFuture, Source
from strop.controller.ray.manager import WorkerManager
from strop.controller.ray.members import WorkerHandle
from strop.controller.ray.pending import RayPending, Traffic
from strop.controller.ray.process import Shared
from strop.controller.ray.transport import HEAVY_BYTES, payload_bytes
from strop.controller.worker import Worker
from strop.protocol import DataProto

W = TypeVar("W", bound=Worker)
M = TypeVar("M")


class RoleGroup(WorkerGroup[W]):
    """The workers of one role in the processes of a pool, one in each."""

    num_objects = 0
    """Values that a call returns beside its response, which hold the rows of a batch; 0: the worker's process holds
    them."""

    def __init__(
        self,
        worker_class: type[W],
        mesh: Mesh,
        *,
        role: str,
        manager: WorkerManager,
        members: Sequence[WorkerHandle],
        call_timeout_s: float,
        traffic: Traffic,
    ) -> None:
        """Name workers that were made already.

        Args:
            worker_class: their class.
            mesh: their parallel axes.
            role: their role in the processes.
            manager: of the processes.
            members: the processes, in rank order.
            call_timeout_s: deadline of a call, where the group's own `call_timeout_s` sets none.
            traffic: where to count what goes through the controller.
        """
        super().__init__(worker_class, mesh)
        self.role = role
        """Name of the role."""
        self.traffic = traffic
        """Traffic through the controller for all groups of its runtime."""
        self.manager = manager
        """Manager of the processes."""
        self.members = list(members)
        """The processes, in rank order."""
        self._default_timeout_s = call_timeout_s

    def submit(self, calls: Sequence[WorkerCall]) -> list[Pending[Any]]:
        """Give workers calls; each starts when those given to its process before have ended."""
        self.manager.check_works()
        number, timeout_s = self.manager.next_call(), self.call_timeout_s or self._default_timeout_s
        arguments = _Arguments(self.traffic)
        return [self._start_call(arguments.stored(call), number, timeout_s) for call in calls]

    def joined(self, outputs: Sequence[Pending[Any]], partition: Partition | None) -> DataProto:
        """The rows, which stay with the workers until somebody needs them."""
        return DataProtoFuture(cast(Sequence[Source], outputs), partition)

    def metrics(self, output: Pending[BatchAndMetrics[M]]) -> tuple[M, ...]:
        """The metrics alone; the rows stay with the worker."""
        return cast(RayPending, output).metrics()

    def _start_call(self, call: WorkerCall, number: int, timeout_s: float) -> RayPending:
        objects: list[Any] = []

        def give(handle: Any) -> Any:
            if not self.num_objects:
                return handle.call.remote(self.role, call, timeout_s)
            method = handle.call_with_objects.options(num_returns=1 + self.num_objects)
            response, *objects[:] = method.remote(self.role, call, timeout_s, self.num_objects)
            return response

        pending = self.manager.give(
            self.members[call.rank],
            give,
            role=self.role,
            method=call.method,
            call=number,
            timeout_s=timeout_s,
            objects=objects,
        )
        return RayPending(self.manager, pending, self.traffic)


def role_groups(
    classes: Mapping[str, type[Any]],
    meshes: Mapping[str, Mesh],
    *,
    manager: WorkerManager,
    members: Sequence[WorkerHandle],
    call_timeout_s: float,
    traffic: Traffic,
) -> dict[str, RoleGroup[Any]]:
    """The groups of roles, named by their worker classes, that share processes; see `RoleGroup`."""
    return {
        role: RoleGroup(
            worker_class,
            meshes[role],
            role=role,
            manager=manager,
            members=members,
            call_timeout_s=call_timeout_s,
            traffic=traffic,
        )
        for role, worker_class in classes.items()
    }


class _Arguments:
    """The arguments of one group call: a heavy one is stored once for all workers."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._seen: dict[int, tuple[Any, Any, int]] = {}

    def stored(self, call: WorkerCall) -> WorkerCall:
        """The same call with references in the place of heavy arguments."""
        return replace(
            call,
            args=[self._sendable(arg) for arg in call.args],
            kwargs={name: self._sendable(arg) for name, arg in call.kwargs.items()},
        )

    def _sendable(self, arg: object) -> Any:
        """The argument itself if it is light, else a reference to it, the same for all workers of the call."""
        if id(arg) not in self._seen:
            size = payload_bytes(arg)
            sent = arg
            if size >= HEAVY_BYTES:
                sent = Shared(ray.put(arg))
                self._traffic.sent_bytes += size
            self._seen[id(arg)] = (arg, sent, 0 if size >= HEAVY_BYTES else size)
        _, sent, repeated = self._seen[id(arg)]
        self._traffic.sent_bytes += repeated
        return sent
