"""Base class of a role's workers: an ordinary object with its placement in the group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from strop.controller.mesh import Mesh
from strop.controller.rendezvous import Rendezvous
from strop.run.profile.parts import write_part
from strop.utils import process_profiler
from strop.utils.timeline import Track

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True, kw_only=True)
class FollowerAddress:
    """Address of a worker that holds the devices of another node for the one that it follows."""

    host: str
    """Address of its node."""
    port: int
    secret: str = field(repr=False)
    """Proves the leader to it (auth_listener)."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Rank and mesh of a worker in its group; by default, alone."""

    rank: int = 0
    """Number of the worker in its group."""
    mesh: Mesh = field(default_factory=Mesh)
    """The parallel axes of the group."""
    local_rank: int = 0
    """Number of the worker's process among those of the group on its node."""
    local_world_size: int = 1
    """Processes of the group on the worker's node."""
    rendezvous: Rendezvous | None = None
    """Rendezvous of the group's processes; None where there is nothing to join, because the workers share a process or
    there is one."""
    master_addr: str = "127.0.0.1"
    """Address of rank 0, for code that makes process groups of its own by address and port."""
    master_port: int = 0
    """A port that was free there; 0 where the workers share a process."""
    node: str = ""
    """Name of the node, for messages."""
    role: str = ""
    """Name of the role, for messages and for `Worker.colocated`."""
    followers: tuple[FollowerAddress, ...] = ()
    """Followers on the other nodes of a rank that spans several, in the order of the nodes."""


@dataclass(frozen=True)
class _WorkerContext:
    """Context in which a worker is constructed."""

    placement: Placement
    colocated: Mapping[str, Worker] | None


_CONTEXT: ContextVar[_WorkerContext | None] = ContextVar("strop_worker_context", default=None)


@contextmanager
def placed(placement: Placement, colocated: Mapping[str, Worker] | None = None) -> Iterator[None]:
    """Workers made inside this context have this placement and these neighbours; for the runtimes.

    `RoleSpec.make` enters a worker into the neighbours when it is made; without neighbours it has only
    itself.
    """
    token = _CONTEXT.set(_WorkerContext(placement, colocated))
    try:
        yield
    finally:
        _CONTEXT.reset(token)


class Worker:
    """One worker of a role. Made outside a group it is rank 0 of 1, so it also runs in a plain test.

    Placement and neighbours are known from the start of `__init__`, with or without a call of
    `super().__init__`.
    """

    placement: Placement
    """Rank and mesh in the group; set before `__init__` runs."""
    _neighbours: Mapping[str, Worker] | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """An object that has its placement already."""
        worker = super().__new__(cls)
        context = _CONTEXT.get()
        worker.placement = Placement() if context is None else context.placement
        worker._neighbours = None if context is None else context.colocated
        return worker

    @property
    def colocated(self) -> Mapping[str, Worker]:
        """The workers of this process by role, in the order of creation, this one included.

        During `__init__` it has the workers made before.
        """
        return {self.placement.role: self} if self._neighbours is None else self._neighbours

    def close(self) -> None:
        """Release resources that outlive the object, such as child processes; the runtime calls it at its end.

        The base class holds nothing.
        """

    @property
    def timeline_track(self) -> Track:
        """Its place in the timeline of a step."""
        return Track(self.placement.role or type(self).__name__, self.rank)

    @property
    def profile_label(self) -> str:
        """Name of its process in the files of a profiled step, where it is the first worker of the process."""
        return f"{self.timeline_track.role}-{self.rank}"

    def profile_clock(self) -> tuple[str, float]:
        """Its profile_label, and the time by the clock of its spans (strop.utils.timeline)."""
        return self.profile_label, time.perf_counter()

    def start_profile(self, *, memory: bool) -> str:
        """Start the profilers of this process (strop.utils.process_profiler); the label of the spans that it will
        write, empty where another worker or the controller does."""
        return self.profile_label if process_profiler.start(self.profile_label, memory=memory) else ""

    def stop_profile(self, folder: Path) -> None:
        """Stop the profilers of this process, and write their files into the folder of the step."""
        process_profiler.stop(folder, write_part)

    @property
    def rank(self) -> int:
        """Number of this worker in its group."""
        return self.placement.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return self.placement.mesh.world_size

    @property
    def local_rank(self) -> int:
        """Number of this worker's process among those of the group on its node."""
        return self.placement.local_rank

    @property
    def local_world_size(self) -> int:
        """Processes of the group on this worker's node."""
        return self.placement.local_world_size

    @property
    def master_addr(self) -> str:
        """Address of rank 0."""
        return self.placement.master_addr

    @property
    def master_port(self) -> int:
        """A port that was free there; 0 where the workers share a process."""
        return self.placement.master_port

    def rendezvous(self, *, timeout_s: float = 600.0) -> Store:
        """A store for `torch.distributed.init_process_group(store=...)` over the processes of the group.

        It lets in only them, unlike the one that torch makes from an address and a port, which serves whoever comes.
        Each call is for another group, and all processes make the calls in the same order.

        Raises:
            ValueError: the group has one process.
        """
        if self.placement.rendezvous is None:
            raise ValueError(f"role {self.placement.role!r} has one process, so there is nobody to meet")
        return self.placement.rendezvous.join(timeout_s=timeout_s)

    @property
    def dp_rank(self) -> int:
        """Number of this worker's part of a batch."""
        return self.placement.mesh.dp_rank(self.rank)

    @property
    def dp_size(self) -> int:
        """Number of parts a batch is cut into."""
        return self.placement.mesh.dp


class Follower(Worker):
    """Worker on a further node of a rank that spans several: it holds devices for the leader, and takes no calls."""

    def address(self) -> FollowerAddress:
        """Address for the leader, which is made after it."""
        raise NotImplementedError


def close_all(workers: Sequence[Worker]) -> None:
    """Close the workers of a process, last made first; an error of one is raised after all were closed."""
    errors: list[Exception] = []
    for worker in reversed(workers):
        try:
            worker.close()
        except Exception as error:  # noqa: BLE001  the other workers hold things too
            errors.append(error)
    if errors:
        raise errors[0]
