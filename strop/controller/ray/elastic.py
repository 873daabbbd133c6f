"""Worker groups that go on without workers whose processes are lost, and replace them.

The workers are data parallel and know nothing of each other's ranks, so that any number of them does the work. A lost
process costs the calls that it had: `Registration.leaves_out_lost` says whether such a call raises WorkerLost. What
calls returned before stays, because the controller holds it, unless its whole machine is gone.

Nothing waits for a replacement: it is started in its turn with everything else, and joins the group when its user says
so (`take_started`, `add`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import ray

from strop.controller.call import Pending
from strop.controller.errors import WorkerLost
from strop.controller.mesh import Mesh
from strop.controller.partition import Partition
from strop.controller.ray.errors import RankLost
from strop.controller.ray.future import DataProtoFuture
from strop.controller.ray.group import RoleGroup
from strop.controller.ray.manager import WorkerManager
from strop.controller.ray.members import PendingCall, WorkerHandle
from strop.controller.ray.pending import RayPending, RowsOfLiving, Traffic
from strop.controller.ray.pool import RayResourcePool
from strop.controller.ray.start import StartOptions, make_worker, placement_of, start_rank
from strop.controller.roles import RoleSpec
from strop.controller.worker import Worker
from strop.protocol import DataProto

W = TypeVar("W", bound=Worker)

NUM_OBJECTS = 16
"""Values that a call returns beside its response: heavy columns of a batch and the rest of it. Unused ones are None."""


def check_replaceable(role: str, mesh: Mesh) -> None:
    """Refuse workers that share rows: ValueError where the mesh is not data parallel alone."""
    if mesh.dp != mesh.world_size:
        raise ValueError(
            f"role {role!r} has the mesh {mesh}, but only data-parallel workers are replaced one by one"
        )


class ElasticGroup(RoleGroup[W]):
    """Data-parallel workers of one role, of which some may be lost and replaced."""

    num_objects = NUM_OBJECTS

    def __init__(
        self,
        spec: RoleSpec[W],
        mesh: Mesh,
        *,
        role: str,
        manager: WorkerManager,
        members: Sequence[WorkerHandle],
        call_timeout_s: float,
        traffic: Traffic,
        pool: RayResourcePool,
        options: StartOptions,
    ) -> None:
        """Name workers that were made already; from now on their processes are replaceable.

        Args:
            spec: of which they were made, and of which others will be.
            mesh: data parallel alone (`check_replaceable`).
            role, manager, members, call_timeout_s, traffic: as of RoleGroup.
            pool: places of their processes.
            options: of the start of these, and of others.
        """
        super().__init__(
            spec.worker_class,
            mesh,
            role=role,
            manager=manager,
            members=members,
            call_timeout_s=call_timeout_s,
            traffic=traffic,
        )
        self._spec, self._whole_mesh = dataclasses.replace(spec, mesh=mesh), mesh
        self._pool, self._options = pool, options
        self._starting: list[tuple[WorkerHandle, PendingCall]] = []
        self._num_reported = len(manager.losses)
        for member in self.members:
            member.is_replaceable = True

    @property
    def mesh(self) -> Mesh:
        """The axes of those that are left."""
        return Mesh(dp=len(self.members))

    @property
    def ranks(self) -> list[int]:
        """Rank of each worker that is left, by which it knows itself."""
        self.refresh()
        return [member.rank for member in self.members]

    @property
    def pids(self) -> list[int]:
        """Process of each worker that is left: other ones where the group has changed."""
        self.refresh()
        return [member.pid for member in self.members]

    def refresh(self) -> None:
        """Leave out the workers that are known to be lost; calls that are under way keep theirs."""
        self.members = [member for member in self.members if member.loss is None]

    def check(self) -> None:
        """Ask every process whether it lives, and leave out those that do not.

        Raises:
            WorkerFailed: all of them are gone.
        """
        call = self.manager.next_call()
        pending_calls = [
            self.manager.give(
                member,
                lambda handle: handle.process_info.remote(),
                method="",
                call=call,
                timeout_s=self._default_timeout_s,
            )
            for leader in self.members
            for member in (leader, *leader.followers)
        ]
        for pending in pending_calls:
            try:
                self.manager.wait(pending)
            except WorkerLost:
                continue  # `pop_losses` tells it
        self.refresh()

    def pop_losses(self) -> list[RankLost]:
        """Losses since the call before this one, failed starts of replacements among them."""
        losses = self.manager.losses[self._num_reported :]
        self._num_reported += len(losses)
        self.refresh()
        return losses

    def joined(self, outputs: Sequence[Pending[Any]], partition: Partition | None) -> DataProto:
        """The rows, which the controller holds; those of lost workers are left out where the method allows it."""
        sources = cast(Sequence[RayPending], outputs)
        if self._registrations[sources[0].method].leaves_out_lost:
            return DataProtoFuture([RowsOfLiving(source) for source in sources], partition)
        return DataProtoFuture(sources, partition)

    def _run(self, method_name: str, registration: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.refresh()
        return super()._run(method_name, registration, *args, **kwargs)

    # ---------------------------------------------------------------- replacement

    @property
    def missing(self) -> list[int]:
        """Ranks without a worker and without a replacement that starts."""
        there = {member.rank for member in self.members if member.loss is None}
        there |= {member.rank for member, _ in self._starting if member.loss is None}
        return [rank for rank in range(self._whole_mesh.world_size) if rank not in there]

    def start_replacement(self, rank: int) -> None:
        """Start a process and a worker of this rank, in the place of the one that is lost. Nothing is waited for."""
        member = start_rank(self.manager, self._pool, rank, self._options)
        member.is_replaceable = member.is_starting = True
        info = self.manager.give(
            member,
            lambda handle: handle.process_info.remote(),
            method="start of the worker process",
            timeout_s=self._options.timeout_s,
        )
        placement = placement_of(
            member, self._pool, mesh=self._whole_mesh, role=self.role, first=self.members[0]
        )
        make_worker(
            self.manager,
            member,
            ray.put(self._spec),
            placement,
            follower=ray.put(self._spec.follower),
            timeout_s=self._options.timeout_s,
        )
        self._starting.append((member, info))

    def take_started(self) -> RoleGroup[W] | None:
        """The replacements that have come up since the call before this one, as a group of their own; None for none."""
        self.manager.look()
        started = []
        for member, info in list(self._starting):
            if member.loss is not None:
                self._starting.remove((member, info))
            elif not member.queue:
                self._starting.remove((member, info))
                member.process_info, member.is_starting = info.answer, False
                started.append(member)
        if not started:
            return None
        return RoleGroup(
            self._worker_class,
            Mesh(dp=len(started)),
            role=self.role,
            manager=self.manager,
            members=started,
            call_timeout_s=self._default_timeout_s,
            traffic=self.traffic,
        )

    def add(self, group: RoleGroup[W]) -> None:
        """Take replacements in, in the order of their ranks."""
        self.refresh()
        living = [member for member in group.members if member.loss is None]
        self.members = sorted([*self.members, *living], key=lambda member: member.rank)
