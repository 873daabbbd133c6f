"""Handles of worker processes and their calls, in the controller."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray.util.placement_group import PlacementGroup

from strop.controller.mesh import Mesh
from strop.controller.ray.cluster import Node
from strop.controller.ray.errors import RankLost
from strop.controller.ray.messages import ProcessInfo
from strop.controller.store_server import Rendezvous


@dataclass(kw_only=True, eq=False)
class WorkerHandle:
    """One worker process, seen from the controller."""

    handle: Any
    """Ray's handle of the actor."""
    pool: str
    """Its pool."""
    rank: int
    """Its number there."""
    node: Node
    """Node of the process."""
    log_path: Path
    """Its output, on its node."""
    process_info: ProcessInfo | None = None
    """Facts that it reported at its start."""
    rendezvous: Rendezvous | None = None
    """Rendezvous of the processes of its pool; of rank 0 alone, once it has started it."""
    roles: list[str] = field(default_factory=list)
    """The roles it holds."""
    queue: deque[PendingCall] = field(default_factory=deque)
    """Its open calls, in the order in which it runs them."""
    last_call: PendingCall | None = None
    """The last call that it answered."""
    answered_at: float = 0.0
    """When it last answered, by the monotonic clock."""
    peak_memory_bytes: int = 0
    """Most memory it said to have held."""
    is_replaceable: bool = False
    """Its end costs its own calls alone, while others of its pool live."""
    is_starting: bool = False
    """It is a replacement whose workers are not made yet."""
    loss: RankLost | None = None
    """Its end, where the others went on."""
    leader: WorkerHandle | None = None
    """The process that it follows, where it is on a further node of a rank; it takes no calls, and ends with it."""
    followers: list[WorkerHandle] = field(default_factory=list)
    """The processes that follow it on the other nodes of its rank, in the order of the nodes."""

    @property
    def pid(self) -> int:
        """Its process id; 0 before it has started."""
        return 0 if self.process_info is None else self.process_info.pid

    @property
    def where(self) -> str:
        """Node and process, for messages."""
        return f"node {self.node.address}, pid {self.pid or 'unknown: it has not started'}"


@dataclass(kw_only=True, eq=False)
class PendingCall:
    """One call given to one process."""

    member: WorkerHandle
    """The process."""
    role: str
    """Role of the worker; empty for the process itself."""
    method: str
    """Its method, or a phase of the start."""
    call: int
    """The calls of one group call have one number."""
    reference: Any
    """Ray's reference to the answer."""
    timeout_s: float
    """Deadline."""
    given_at: float
    """Time of the call, by the monotonic clock."""
    objects: Sequence[Any] = ()
    """References to what is returned beside the answer."""
    answer: Any = None
    """Answer of the process."""
    error: Exception | None = None
    """Error in place of an answer."""
    is_settled: bool = False
    """True once there is an answer or an error."""

    @property
    def label(self) -> str:
        """`critic.compute_values`."""
        return f"{self.role}.{self.method}" if self.role else self.method


@dataclass(frozen=True, kw_only=True)
class GroupInfo:
    """Information to attach to a detached group; each of its processes keeps it."""

    members: Sequence[WorkerHandle]
    """The processes in rank order, without handles and calls, seen from the controller that made them."""
    meshes: Mapping[str, Mesh]
    """Parallel axes of each role."""
    places: PlacementGroup
    """Resources of the processes."""
