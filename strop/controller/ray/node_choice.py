"""Nodes of a Ray cluster that have what resource pools need."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from strop.controller.ray.cluster import Cluster, Node, accelerator_resource
from strop.controller.ray.errors import NotEnoughDevices
from strop.controller.ray.pool import RayResourcePool
from strop.controller.ray.resource_text import in_words, resources_text

_SETTLE_S = 5.0
"""Time for which resources of processes that just ended may still count as taken."""


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
        f"{sum(pool.process_on_nodes)} processes of {in_words(pool.bundle)} each (pool {pool.name!r})"
        for pool in pools
    )
    totals = "".join(
        f"; {pool.name} needs {pool.world_size} replicas x {_devices_of_rank(pool)} devices = "
        f"{pool.world_size * _devices_of_rank(pool)}, the cluster has {_num_devices(pool, nodes):g}"
        for pool in pools
        if _devices_of_rank(pool) > 1
    )
    per_node = "; ".join(f"{in_words(need)} on node {number + 1}" for number, need in enumerate(needs))
    return (
        f"asked for {request}: {per_node}{totals}. {supply}: {resources_text(nodes)}. Lower resources.ranks, lower "
        f"resources.cpus_per_rank (a fraction lets processes share a core), or use more nodes"
    )


def _devices_of_rank(pool: RayResourcePool) -> int:
    return pool.devices_per_process * pool.nodes_per_rank


def _num_devices(pool: RayResourcePool, nodes: Sequence[Node]) -> float:
    """Devices of the nodes, of the kind of a pool; on a CPU, as many as have their cores."""
    resource = accelerator_resource(pool.device)
    total = sum(node.total.get(resource or "CPU", 0.0) for node in nodes)
    return total if resource else total // pool.cpus_per_process


def _sum(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0) + amount
    return total
