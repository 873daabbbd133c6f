"""Places for worker processes: how many on each node."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from strop.controller.mesh import Mesh


class ResourcePool:
    """Places of the worker processes of one or several roles, node by node; says nothing of a runtime.

    Ranks count through the first node, then the second, and so on.
    """

    def __init__(
        self, process_on_nodes: Sequence[int], *, max_colocate_count: int = 10, name: str = "main"
    ) -> None:
        """Describe a pool.

        Args:
            process_on_nodes: processes on each node, at least 1 each; with accelerators, one device per
                process.
            max_colocate_count: worker groups that may share the places, each with processes of its own;
                roles that are fused into one process count once. The default is verl's.
            name: what configurations and messages call the pool.

        Raises:
            ValueError: there is no node, a node has no process, or `max_colocate_count` is below 1.
        """
        self.process_on_nodes = tuple(process_on_nodes)
        """Processes on each node."""
        self.max_colocate_count = max_colocate_count
        """Worker groups that may share the places."""
        self.name = name
        """What configurations and messages call the pool."""
        if not self.process_on_nodes:
            raise ValueError(f"pool {name!r} has no nodes; give the processes of each node, such as [8, 8]")
        for node, count in enumerate(self.process_on_nodes):
            if count < 1:
                raise ValueError(
                    f"pool {name!r} has {count} processes on node {node}; leave out nodes without processes"
                )
        if max_colocate_count < 1:
            raise ValueError(f"pool {name!r} has max_colocate_count {max_colocate_count}; at least 1 group")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {list(self.process_on_nodes)} processes on nodes)"

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return sum(self.process_on_nodes)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.process_on_nodes)

    def node_of(self, rank: int) -> int:
        """Number of the node on which a rank runs."""
        return self._place(rank)[0]

    def local_rank(self, rank: int) -> int:
        """Number of a rank among the processes of its node."""
        return self._place(rank)[1]

    def local_world_size(self, rank: int) -> int:
        """Processes on the node of a rank."""
        return self.process_on_nodes[self.node_of(rank)]

    def check_mesh(self, mesh: Mesh, role: str) -> None:
        """Raise ValueError unless a role's mesh has as many workers as the pool has processes."""
        if mesh.world_size != self.world_size:
            raise ValueError(
                f"role {role!r} has a mesh of {mesh.world_size} workers, but pool {self.name!r} has "
                f"{self.world_size} processes; change the mesh or the pool"
            )

    def _place(self, rank: int) -> tuple[int, int]:
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank {rank} is not in pool {self.name!r}, which has {self.world_size} processes"
            )
        ends = list(accumulate(self.process_on_nodes))
        node = bisect_right(ends, rank)
        return node, rank - ends[node] + self.process_on_nodes[node]
