"""Resource pools of worker processes on a Ray cluster: nodes, and resources held by a placement group."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from strop.controller.errors import PlacesNotFree
from strop.controller.ray.cluster import Cluster, Node, accelerator_resource
from strop.controller.ray.resource_text import TYPE, in_words, resources_text

_NODE_LABEL = "ray.io/node-id"
_MARKER = 1e-4
"""Amount of `accelerator_type:<name>` that a place takes of its node, which has 1: the smallest that Ray counts."""


class RayResourcePool:
    """Places of worker processes on the nodes of a Ray cluster, held while worker groups use them.

    Ranks count through the first node, then the second, and so on. A rank is one process on one node; or it spans
    nodes, which are its own: its leader is on the first of them, a follower on each other one.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = False,
        name_prefix: str = "main",
        max_colocate_count: int = 10,
        *,
        device: str | None = None,
        cpus_per_process: float = 1.0,
        devices_per_process: int = 1,
        nodes_per_rank: int = 1,
        accelerator_type: str | None = None,
    ) -> None:
        """Describe a pool; nothing is taken yet.

        Args:
            process_on_nodes: processes on each node, at least 1 each; 1 where ranks span nodes.
            use_gpu: one GPU per process; the same as `device="cuda"`.
            name_prefix: what configurations and messages call the pool.
            max_colocate_count: worker groups that may share the places, each with processes of its own (roles that are
                fused into one process count once); each of them gets this part of a place's cores and device.
            device: kind of device, one per process; `cpu` for none.
            cpus_per_process: cores of a place for each of its devices, a fraction where processes share one.
            devices_per_process: devices of a place, all on one node; on a CPU, so many times the cores.
            nodes_per_rank: nodes that a rank spans, with a place on each.
            accelerator_type: only nodes with accelerators of this type, by Ray's name of it, such as H100; None: any.

        Raises:
            ValueError: there is no node, a node has no process, a number is too small, or a pool without devices names
                their type.
        """
        self.process_on_nodes = tuple(process_on_nodes)
        """Processes on each node."""
        self.max_colocate_count = max_colocate_count
        """Worker groups that may share the places."""
        self.name = name_prefix
        """Name of the pool in configurations and messages."""
        self.device = device or ("cuda" if use_gpu else "cpu")
        """Kind of device."""
        self.cpus_per_process = cpus_per_process
        """Cores of a place for each of its devices."""
        self.devices_per_process = devices_per_process
        """Devices of a place."""
        self.nodes_per_rank = nodes_per_rank
        """Nodes that a rank spans."""
        self.accelerator_type = accelerator_type
        """Type of the accelerators, by Ray's name of it; None: any."""
        self._num_users = 0
        self.machines: Sequence[Node] = []
        """The nodes in the order of `process_on_nodes`, once the places are taken."""
        self.launch_commands: Mapping[str, str] = {}
        """By node, what starts a worker process there, once the first ones have been started."""
        self._group: PlacementGroup | None = None
        self._refuse_what_cannot_be()

    def _refuse_what_cannot_be(self) -> None:
        if not self.process_on_nodes:
            raise ValueError(
                f"pool {self.name!r} has no nodes; give the processes of each node, such as [8, 8]"
            )
        for node, count in enumerate(self.process_on_nodes):
            if count < 1:
                raise ValueError(
                    f"pool {self.name!r} has {count} processes on node {node}; leave out nodes without processes"
                )
        if self.max_colocate_count < 1:
            raise ValueError(
                f"pool {self.name!r} has max_colocate_count {self.max_colocate_count}; at least 1 group"
            )
        if self.devices_per_process < 1:
            raise ValueError(
                f"pool {self.name!r} has {self.devices_per_process} devices per process; at least 1"
            )
        if self.accelerator_type and self.device == "cpu":
            raise ValueError(
                f"pool {self.name!r} has accelerator_type {self.accelerator_type!r} and no accelerators; pass "
                f"use_gpu=True, or leave the type out"
            )
        if self.nodes_per_rank > 1 and (
            set(self.process_on_nodes) != {1} or self.num_nodes % self.nodes_per_rank
        ):
            raise ValueError(
                f"pool {self.name!r} has ranks over {self.nodes_per_rank} nodes each, and processes "
                f"{list(self.process_on_nodes)} on its nodes; use one on each of a multiple of {self.nodes_per_rank}"
            )
        if self.cpus_per_process <= 0:
            raise ValueError(
                f"pool {self.name!r} has {self.cpus_per_process} cores per process; use a fraction such as 0.1 "
                f"where many processes share a core"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks: processes without followers."""
        return sum(self.process_on_nodes) // self.nodes_per_rank

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.process_on_nodes)

    def node_of(self, rank: int) -> int:
        """Number of the node on which a rank runs: the first one of those that it spans."""
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} is not in pool {self.name!r}, which has {self.world_size} processes"
            )
        return bisect_right(list(accumulate(self.process_on_nodes)), rank * self.nodes_per_rank)

    def local_rank(self, rank: int) -> int:
        """Number of a rank among the processes of its node."""
        return rank * self.nodes_per_rank - sum(self.process_on_nodes[: self.node_of(rank)])

    def local_world_size(self, rank: int) -> int:
        """Processes on the node of a rank."""
        return self.process_on_nodes[self.node_of(rank)]

    @property
    def place(self) -> dict[str, float]:
        """Resources of one process, by Ray's names."""
        resource = accelerator_resource(self.device)
        count = float(self.devices_per_process)
        return {"CPU": self.cpus_per_process * count, **({resource: count} if resource else {})}

    @property
    def bundle(self) -> dict[str, float]:
        """Resources that the placement group holds for one process: its place, on a node of the type."""
        marker = {f"{TYPE}{self.accelerator_type}": _MARKER} if self.accelerator_type else {}
        return self.place | marker

    @property
    def is_taken(self) -> bool:
        """True while a user holds the places."""
        return self._group is not None

    @property
    def nodes(self) -> list[Node]:
        """The node of each rank, the first one of those that it spans, once the places are taken."""
        return [self.machines[self.node_of(rank)] for rank in range(self.world_size)]

    def nodes_of(self, rank: int) -> Sequence[Node]:
        """The nodes that a rank spans, once the places are taken."""
        first = self.node_of(rank)
        return self.machines[first : first + self.nodes_per_rank]

    def bundle_of(self, rank: int, number: int) -> int:
        """The bundle of a rank's place on one of the nodes that it spans, by the number of the node."""
        return rank * self.nodes_per_rank + number

    @property
    def placement_group(self) -> PlacementGroup:
        """Ray's placement group, one bundle per place, in rank order (`bundle_of`), once the places are taken."""
        if self._group is None:
            raise RuntimeError(f"the places of pool {self.name!r} are not taken yet")
        return self._group

    def get_placement_groups(self) -> list[PlacementGroup]:
        """The placement group, under verl's name for it."""
        return [self.placement_group]

    def take(
        self, cluster: Cluster, nodes: Sequence[Node], *, timeout_s: float, is_detached: bool = False
    ) -> None:
        """Hold the places for one more user, who calls `close` at his end.

        Args:
            cluster: where.
            nodes: the nodes to use, in the order of `process_on_nodes`; those of the first user stay.
            timeout_s: how long to wait for others to give up what they hold.
            is_detached: the places outlive this process.

        Raises:
            PlacesNotFree: others hold what the cluster has.
            ValueError: the places are to outlive this process, but are held already.
        """
        if self._group is not None and is_detached:
            raise ValueError(
                f"pool {self.name!r} is in use by another group; make a pool of its own for a detached group"
            )
        if self._group is not None:
            self._num_users += 1
            return
        labels = [
            {_NODE_LABEL: node.node_id}
            for node, count in zip(nodes, self.process_on_nodes, strict=True)
            for _ in range(count)
        ]
        bundles = [self.bundle for _ in labels]
        group = placement_group(
            bundles,
            strategy="PACK",
            lifetime="detached" if is_detached else None,
            bundle_label_selector=labels,
        )
        if not group.wait(timeout_s):
            remove_placement_group(group)
            raise PlacesNotFree(
                f"the places of pool {self.name!r} ({len(bundles)} x {in_words(self.bundle)}) were not free "
                f"within {timeout_s:g} s; there is: {resources_text(cluster.nodes())}; end what holds the rest, or "
                f"add a machine"
            )
        self.machines, self._group, self._num_users = nodes, group, 1

    def close(self) -> None:
        """One user less, whose processes have ended; the last one gives the places back."""
        self._num_users = max(self._num_users - 1, 0)
        if self._num_users == 0 and self._group is not None:
            group, self._group = self._group, None
            if ray.is_initialized():
                remove_placement_group(group)
