"""Resource pools of worker processes on a Ray cluster: nodes, and resources held by a placement group."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from strop.controller.errors import PlacesNotFree
from strop.controller.ray.cluster import Cluster, Node, accelerator_resource
from strop.controller.ray.errors import NotEnoughDevices

_SETTLE_S = 5.0
"""Time for which resources of processes that just ended may still count as taken."""
_NODE_LABEL = "ray.io/node-id"
_TYPE = "accelerator_type:"
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
        marker = {f"{_TYPE}{self.accelerator_type}": _MARKER} if self.accelerator_type else {}
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
                f"the places of pool {self.name!r} ({len(bundles)} x {_in_words(self.bundle)}) were not free "
                f"within {timeout_s:g} s; there is: {_resources_text(cluster.nodes())}; end what holds the rest, or "
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


def nodes_per_rank(cluster: Cluster, pool: str, count: int, *, device: str, cpus_per_process: float) -> int:
    """Nodes that a rank of so many devices spans: 1 where a node has them, else whole nodes.

    Args:
        cluster: where; its largest node counts.
        pool: for messages.
        count: devices of a rank.
        device, cpus_per_process: as of RayResourcePool.

    Raises:
        NotEnoughDevices: nodes of that size cannot share the devices evenly.
    """
    one = RayResourcePool([1], name_prefix=pool, device=device, cpus_per_process=cpus_per_process)
    largest = max((int(_num_devices(one, [node])) for node in cluster.nodes()), default=0)
    if largest == 0 or count <= largest:
        return 1
    if count % largest:
        fitting = count // largest * largest
        raise NotEnoughDevices(
            f"a process of pool {pool!r} needs {count} devices, and the largest node has {largest}, so it takes whole "
            f"nodes; {count} are not a multiple of {largest}: use {fitting} or {fitting + largest} devices"
        )
    return count // largest


def choose_nodes(cluster: Cluster, pools: Sequence[RayResourcePool]) -> list[Node]:
    """The nodes for pools, in a stable order: the first that have enough.

    Nodes with enough free resources come before nodes where others hold some.

    Args:
        cluster: where.
        pools: they share the nodes: the first node of one is the first node of all; behind these follow those of pools
            whose ranks span nodes, which share none (`nodes_of_pools`).

    Raises:
        NotEnoughDevices: there are too few nodes, or they have too little; in a private cluster also where
            this process's other worker groups hold it, since nobody else can give it back.
    """
    needs = _needs(pools)
    end = time.monotonic() + _SETTLE_S
    while True:
        nodes = cluster.nodes()
        if chosen := _fit_nodes(needs, nodes, [node.free for node in nodes]):
            return chosen
        possible = _fit_nodes(needs, nodes, [node.total for node in nodes])
        if possible is None:
            raise NotEnoughDevices(_shortage_text(pools, needs, nodes, "there is"))
        if not cluster.is_private:
            return possible
        if time.monotonic() > end:
            raise NotEnoughDevices(
                _shortage_text(
                    pools, needs, nodes, "other worker groups of this process hold a part of it; free"
                )
            )
        time.sleep(0.1)


def nodes_of_pools(pools: Mapping[str, RayResourcePool], nodes: Sequence[Node]) -> dict[str, Sequence[Node]]:
    """The nodes of each pool among those that `choose_nodes` gives for all of them."""
    start = _num_shared(pools.values())
    chosen: dict[str, Sequence[Node]] = {}
    for name, pool in pools.items():
        if pool.nodes_per_rank == 1:
            chosen[name] = nodes[: pool.num_nodes]
        else:
            chosen[name] = nodes[start : start + pool.num_nodes]
            start += pool.num_nodes
    return chosen


def has_free_nodes(
    cluster: Cluster, pools: Sequence[RayResourcePool], *, beside: Collection[str] = ()
) -> bool:
    """True where nodes of the cluster, other than those named, have free what the pools need (`choose_nodes`)."""
    nodes = [node for node in cluster.nodes() if node.node_id not in beside]
    return _fit_nodes(_needs(pools), nodes, [node.free for node in nodes]) is not None


def _num_shared(pools: Iterable[RayResourcePool]) -> int:
    """Nodes of the pools that share them."""
    return max((pool.num_nodes for pool in pools if pool.nodes_per_rank == 1), default=0)


def _needs(pools: Sequence[RayResourcePool]) -> list[dict[str, float]]:
    """Resources that the pools need of each of their nodes; those that they share come first."""
    shared = [
        _sum(
            [
                {name: amount * pool.process_on_nodes[number] for name, amount in pool.bundle.items()}
                for pool in pools
                if pool.nodes_per_rank == 1 and number < pool.num_nodes
            ]
        )
        for number in range(_num_shared(pools))
    ]
    return shared + [pool.bundle for pool in pools if pool.nodes_per_rank > 1 for _ in range(pool.num_nodes)]


def _fit_nodes(
    needs: Sequence[Mapping[str, float]], nodes: Sequence[Node], have: Sequence[Mapping[str, float]]
) -> list[Node] | None:
    remaining = list(zip(nodes, have, strict=True))
    chosen: dict[int, Node] = {}
    # The largest first, which fit on the fewest nodes.
    for place, need in sorted(enumerate(needs), key=lambda entry: -_num_accelerators(entry[1])):
        index = next(
            (
                number
                for number, (_, has) in enumerate(remaining)
                if all(has.get(k, 0) >= need[k] - 1e-6 for k in need)
            ),
            None,
        )
        if index is None:
            return None
        chosen[place] = remaining.pop(index)[0]
    return [chosen[place] for place in range(len(needs))]


def _num_accelerators(need: Mapping[str, float]) -> float:
    return sum(amount for name, amount in need.items() if name != "CPU")


def _shortage_text(
    pools: Sequence[RayResourcePool], needs: Sequence[Mapping[str, float]], nodes: Sequence[Node], supply: str
) -> str:
    request = " and ".join(
        f"{sum(pool.process_on_nodes)} processes of {_in_words(pool.bundle)} each (pool {pool.name!r})"
        for pool in pools
    )
    totals = "".join(
        f"; {pool.name} needs {pool.world_size} replicas x {_devices_of_rank(pool)} devices = "
        f"{pool.world_size * _devices_of_rank(pool)}, the cluster has {_num_devices(pool, nodes):g}"
        for pool in pools
        if _devices_of_rank(pool) > 1
    )
    per_node = "; ".join(f"{_in_words(need)} on node {number + 1}" for number, need in enumerate(needs))
    return (
        f"asked for {request}: {per_node}{totals}. {supply}: {_resources_text(nodes)}. Lower resources.ranks, lower "
        f"resources.cpus_per_rank (a fraction lets processes share a core), or use more nodes"
    )


def _devices_of_rank(pool: RayResourcePool) -> int:
    return pool.devices_per_process * pool.nodes_per_rank


def _num_devices(pool: RayResourcePool, nodes: Sequence[Node]) -> float:
    """Devices of the nodes, of the kind of a pool; on a CPU, as many as have their cores."""
    resource = accelerator_resource(pool.device)
    total = sum(node.total.get(resource or "CPU", 0.0) for node in nodes)
    return total if resource else total // pool.cpus_per_process


def _resources_text(nodes: Sequence[Node]) -> str:
    names = sorted({name for node in nodes for name in node.total if name.isupper()})
    return "; ".join(
        f"node {node.address}{_types_text(node)} has "
        + (
            ", ".join(
                f"{node.free.get(name, 0):g} of {node.total.get(name, 0):g} {name} free" for name in names
            )
            or "nothing to give"
        )
        for node in nodes
    )


def _types_text(node: Node) -> str:
    types = [name.removeprefix(_TYPE) for name in node.total if name.startswith(_TYPE)]
    return f" ({', '.join(types)})" if types else ""


def _in_words(resources: Mapping[str, float]) -> str:
    types = [name.removeprefix(_TYPE) for name in resources if name.startswith(_TYPE)]
    amounts = " and ".join(
        f"{amount:g} {name}" for name, amount in resources.items() if not name.startswith(_TYPE)
    )
    return " ".join([amounts, *(f"of type {name}" for name in types)])


def _sum(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0) + amount
    return total
