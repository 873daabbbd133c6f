"""Worker groups whose workers live in worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import ray

from strop.controller.group import Returns, WorkerGroup
from strop.controller.mesh import Mesh
from strop.controller.ray.crew import Crew
from strop.controller.ray.members import Member
from strop.controller.ray.messages import Order
from strop.controller.ray.pending import RayPending, Traffic
from strop.controller.ray.process import Shared
from strop.controller.ray.transport import HEAVY_BYTES, payload_bytes
from strop.controller.registration import Registration
from strop.controller.worker import Worker
from strop.protocol import Pending

W = TypeVar("W", bound=Worker)


class RoleGroup(WorkerGroup[W]):
    """The workers of one role in the processes of a pool, one in each."""

    def __init__(
        self,
        worker_class: type[W],
        mesh: Mesh,
        *,
        role: str,
        crew: Crew,
        members: Sequence[Member],
        call_timeout_s: float,
        traffic: Traffic | None = None,
    ) -> None:
        """Name workers that were made already.

        Args:
            worker_class: their class.
            mesh: their parallel axes.
            role: their role in the processes.
            crew: what the processes belong to.
            members: the processes, in rank order.
            call_timeout_s: deadline of a call, where the group's own `call_timeout_s` sets none.
            traffic: where to count what goes through the controller.
        """
        super().__init__(worker_class, mesh)
        self.role = role
        """Name of the role."""
        self.traffic = Traffic() if traffic is None else traffic
        """What went through the controller for this group, or for all groups of its runtime."""
        self.crew = crew
        """What the processes belong to."""
        self.members = list(members)
        """The processes, in rank order."""
        self._default_timeout_s = call_timeout_s
        self._open_call: _OpenCall | None = None

    def submit(
        self,
        rank: int,
        method_name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        materialize: bool,
        returns: Returns,
    ) -> RayPending:
        """Give a worker a call; it starts when the calls given to its process before have ended."""
        with self._one_call() as call:
            timeout_s = self.call_timeout_s or self._default_timeout_s
            order = Order(
                role=self.role,
                method=method_name,
                args=[call.sendable(arg) for arg in args],
                kwargs={name: call.sendable(arg) for name, arg in kwargs.items()},
                materialize=materialize,
                returns=returns,
            )
            ticket = self.crew.give(
                self.members[rank],
                lambda handle: handle.call.remote(order, timeout_s),
                role=self.role,
                method=method_name,
                call=call.number,
                timeout_s=timeout_s,
            )
            self.traffic.calls += 1
            return RayPending(self.crew, ticket, self.traffic)

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Pending[Any]]:
        """Start a method on every worker, each with exactly these arguments; one pending result each."""
        with self._one_call():
            return super().execute_all_async(method_name, *args, **kwargs)

    def _run(
        self, method_name: str, registration: Registration, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        with self._one_call():
            return super()._run(method_name, registration, args, kwargs)

    @contextmanager
    def _one_call(self) -> Iterator[_OpenCall]:
        """What is submitted inside belongs to one call: its arguments are stored once for all workers."""
        self.crew.check_works()
        if self._open_call is not None:
            yield self._open_call
            return
        self._open_call = _OpenCall(self.crew.next_call(), self.traffic)
        try:
            yield self._open_call
        finally:
            self._open_call = None


class _OpenCall:
    """A call whose tickets are being given out, and the arguments it has stored so far."""

    def __init__(self, number: int, traffic: Traffic) -> None:
        self.number = number
        self._traffic = traffic
        self._seen: dict[int, tuple[Any, Any, int]] = {}

    def sendable(self, arg: Any) -> Any:
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
