"""Detached groups: processes that outlive their controller, and the lookup by another one.

Such processes have names in the cluster, `<group>/<rank>`. They end with the cluster, or through any controller that
attaches.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup, remove_placement_group

from strop.controller.mesh import Mesh
from strop.controller.ray.cluster import Cluster
from strop.controller.ray.manager import WorkerManager
from strop.controller.ray.members import GroupInfo, WorkerHandle

NAMESPACE = "strop"
"""Default namespace of the names of detached groups."""


@dataclass(frozen=True, kw_only=True)
class DetachedName:
    """Name and namespace under which a detached group is found again."""

    name: str
    """Name of the group, unique in its namespace."""
    namespace: str
    """Namespace of the name."""

    def of_process(self, rank: int) -> dict[str, Any]:
        """Ray's options for a process of the group."""
        return {"name": f"{self.name}/{rank}", "namespace": self.namespace, "lifetime": "detached"}

    def living(self) -> dict[int, Any]:
        """Handles of the living processes by rank; empty where there is no such group."""
        names = [actor["name"] for actor in list_named_actors(True) if actor["namespace"] == self.namespace]
        parts = {name: name.rpartition("/") for name in names}
        actor_of_rank = {
            int(rank): name
            for name, (group, _, rank) in parts.items()
            if group == self.name and rank.isdecimal()
        }
        return {
            rank: ray.get_actor(actor_of_rank[rank], namespace=self.namespace)
            for rank in sorted(actor_of_rank)
        }


def store_group_info(
    manager: WorkerManager,
    members: Sequence[WorkerHandle],
    meshes: Mapping[str, Mesh],
    places: PlacementGroup,
    timeout_s: float,
) -> None:
    """Store in each process of a group the information that another controller needs to attach."""
    descriptions = [
        dataclasses.replace(member, handle=None, queue=deque(), last_call=None) for member in members
    ]
    info = GroupInfo(members=descriptions, meshes=meshes, places=places)
    manager.ask(
        members, lambda handle: handle.remember.remote(info), method="end of the start", timeout_s=timeout_s
    )


class Attached:
    """The processes of a detached group, found by a controller that need not have made them."""

    def __init__(self, name: DetachedName, *, address: str | None, timeout_s: float) -> None:
        """Find them; where only a part of them lives, that part is ended.

        Args:
            name: of the group.
            address: of the cluster; None: what this process is connected to.
            timeout_s: how long a process may take to answer.

        Raises:
            ValueError: there is no such group, it has not finished its start, or a part of it is gone.
            TimeoutError: it does not answer; it goes on.
        """
        self._cluster = Cluster(address)
        self.manager = WorkerManager(on_stop=self._give_back)
        """Manager that calls and ends the processes."""
        try:
            self.info = self._find(name, timeout_s)
            """Information stored by their maker."""
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Let the processes go on without this controller; more than once does no harm."""
        self.manager.leave()
        self._cluster.close()

    def close(self, timeout_s: float) -> None:
        """Close the workers within `timeout_s` and end the processes; more than once does no harm."""
        self.manager.close(timeout_s)

    def _find(self, name: DetachedName, timeout_s: float) -> GroupInfo:
        living = name.living()
        if not living:
            raise ValueError(
                f"there is no detached group {name.name!r} in namespace {name.namespace!r}; it has ended, or was "
                f"made on another cluster"
            )
        first = next(iter(living.values()))
        try:
            info: GroupInfo | None = ray.get(first.info.remote(), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"group {name.name!r} has not answered within {timeout_s:g} s") from None
        if info is None:
            raise ValueError(f"group {name.name!r} has not finished its start; attach when it has")
        self.info = info
        nodes = {node.node_id: node for node in self._cluster.nodes()}
        for rank, handle in living.items():
            member = info.members[rank]
            self.manager.members.append(
                dataclasses.replace(member, handle=handle, node=nodes[member.node.node_id])
            )
        missing = sorted(set(range(len(info.members))) - set(living))
        if missing:
            lost = f"of group {name.name!r}, process {', '.join(map(str, missing))} is gone"
            self.manager.stop(lost)
            raise ValueError(f"{lost}, so the others were ended; make the group again")
        return info

    def _give_back(self) -> None:
        remove_placement_group(self.info.places)
        self._cluster.close()
