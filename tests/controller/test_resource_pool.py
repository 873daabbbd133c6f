from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from strop.controller.ray import RayResourcePool
from strop.controller.ray.cluster import Node
from strop.controller.ray.errors import NotEnoughDevices
from strop.controller.ray.node_choice import choose_nodes, nodes_of_pools, nodes_per_rank


def test_ranks_count_through_one_node_after_the_other() -> None:
    pool = RayResourcePool([2, 3, 1], name_prefix="main")
    assert (pool.world_size, pool.num_nodes) == (6, 3)
    assert [pool.node_of(rank) for rank in range(6)] == [0, 0, 1, 1, 1, 2]
    assert [pool.local_rank(rank) for rank in range(6)] == [0, 1, 0, 1, 2, 0]
    assert [pool.local_world_size(rank) for rank in range(6)] == [2, 2, 3, 3, 3, 1]


def test_the_fields_spelling_is_taken() -> None:
    pool = RayResourcePool(process_on_nodes=[8, 8], max_colocate_count=2)
    assert (pool.world_size, pool.process_on_nodes, pool.max_colocate_count) == (16, (8, 8), 2)


def test_bad_pools_and_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="pool 'left' has no nodes"):
        RayResourcePool([], name_prefix="left")
    with pytest.raises(ValueError, match="pool 'main' has 0 processes on node 1"):
        RayResourcePool([1, 0])
    with pytest.raises(ValueError, match="max_colocate_count 0; at least 1"):
        RayResourcePool([1], max_colocate_count=0)
    for rank in (-1, 3):
        with pytest.raises(ValueError, match=f"rank {rank} is not in pool 'main', which has 3 processes"):
            RayResourcePool([1, 2]).node_of(rank)


def test_a_process_of_several_devices_takes_all_of_them_on_one_node() -> None:
    gpus = RayResourcePool([1, 1], device="cuda", cpus_per_process=0.5, devices_per_process=4)
    assert gpus.place == {"CPU": 2.0, "GPU": 4.0}
    assert RayResourcePool([2], cpus_per_process=1.5, devices_per_process=2).place == {"CPU": 3.0}
    with pytest.raises(ValueError, match="pool 'main' has 0 devices per process; at least 1"):
        RayResourcePool([1], devices_per_process=0)


def cluster(*gpus_of_nodes: float) -> Any:
    """A cluster that nobody else uses, of nodes with so many GPUs."""
    nodes = [
        Node(node_id=str(number), address=f"10.0.0.{number}", total=has, free=has, is_here=False)
        for number, has in enumerate({"CPU": 64.0, "GPU": count} for count in gpus_of_nodes)
    ]
    return SimpleNamespace(nodes=lambda: nodes, is_private=False)


def test_too_few_devices_are_named_with_their_numbers() -> None:
    trainers = RayResourcePool([2], device="cuda")
    engines = RayResourcePool([2], name_prefix="rollout", device="cuda", devices_per_process=4)
    assert [node.node_id for node in choose_nodes(cluster(6, 10), [trainers, engines])] == ["1"]
    with pytest.raises(
        NotEnoughDevices, match="rollout needs 2 replicas x 4 devices = 8, the cluster has 6"
    ) as error:
        choose_nodes(cluster(6), [trainers, engines])
    assert "2 processes of 4 CPU and 4 GPU each (pool 'rollout')" in str(error.value)


def test_ranks_over_nodes_have_a_place_on_each() -> None:
    pool = RayResourcePool([1, 1, 1, 1], device="cuda", devices_per_process=8, nodes_per_rank=2)
    assert (pool.world_size, pool.num_nodes) == (2, 4)
    assert [pool.node_of(rank) for rank in range(2)] == [0, 2]
    assert [pool.bundle_of(rank, number) for rank in range(2) for number in range(2)] == [0, 1, 2, 3]
    assert [(pool.local_rank(rank), pool.local_world_size(rank)) for rank in range(2)] == [(0, 1), (0, 1)]
    pool.machines = cluster(8, 8, 8, 8).nodes()
    assert [node.node_id for node in pool.nodes] == ["0", "2"]
    assert [node.node_id for node in pool.nodes_of(1)] == ["2", "3"]
    for processes in ([2, 2], [1, 1, 1]):
        with pytest.raises(ValueError, match=r"pool 'main' has ranks over 2 nodes each, and processes \["):
            RayResourcePool(processes, nodes_per_rank=2)


@pytest.mark.parametrize(("count", "spanned"), [(1, 1), (8, 1), (16, 2), (24, 3)])
def test_a_rank_takes_whole_nodes_where_one_is_too_small(count: int, spanned: int) -> None:
    found = nodes_per_rank(cluster(4, 8, 8), "rollout", count, device="cuda", cpus_per_process=1.0)
    assert found == spanned


def test_devices_that_whole_nodes_cannot_share_are_named() -> None:
    with pytest.raises(
        NotEnoughDevices,
        match=r"a process of pool 'rollout' needs 12 devices, and the largest node has 8, .* use 8 or 16 devices",
    ):
        nodes_per_rank(cluster(8, 8), "rollout", 12, device="cuda", cpus_per_process=1.0)
    # 64 cores of each node, 10 for a device: 6 devices.
    assert nodes_per_rank(cluster(0, 0), "rollout", 12, device="cpu", cpus_per_process=10.0) == 2


def test_whole_nodes_are_none_of_those_that_other_pools_share() -> None:
    trainers = RayResourcePool([4, 4], device="cuda")
    critics = RayResourcePool([1, 1], device="cuda", name_prefix="critic")
    engines = RayResourcePool(
        [1, 1], name_prefix="rollout", device="cuda", devices_per_process=8, nodes_per_rank=2
    )
    pools = {"main": trainers, "critic": critics, "rollout": engines}
    chosen = nodes_of_pools(pools, choose_nodes(cluster(8, 8, 5, 5, 8), list(pools.values())))
    numbers = {name: [node.node_id for node in nodes] for name, nodes in chosen.items()}
    # The trainers' 4 and the critics' 1 would fit on a node of 8, which the engines then would lack.
    assert numbers == {"main": ["2", "3"], "critic": ["2", "3"], "rollout": ["0", "1"]}
    with pytest.raises(
        NotEnoughDevices, match="rollout needs 1 replicas x 16 devices = 16, the cluster has 18"
    ):
        choose_nodes(cluster(8, 5, 5), list(pools.values()))


def mixed_cluster(*types: str) -> Any:
    """A cluster of nodes with 8 GPUs of such a type each."""
    nodes = [
        Node(node_id=str(number), address=f"10.0.0.{number}", total=has, free=has, is_here=False)
        for number, has in enumerate(
            {"CPU": 64.0, "GPU": 8.0, f"accelerator_type:{name}": 1.0} for name in types
        )
    ]
    return SimpleNamespace(nodes=lambda: nodes, is_private=False)


def test_a_pool_is_placed_on_nodes_of_its_accelerator_type() -> None:
    nodes = mixed_cluster("A100", "H100", "A100", "H100")
    pool = RayResourcePool([8, 8], use_gpu=True, accelerator_type="H100")
    assert [node.node_id for node in choose_nodes(nodes, [pool])] == ["1", "3"]
    assert [node.node_id for node in choose_nodes(nodes, [RayResourcePool([8, 8], use_gpu=True)])] == [
        "0", "1"
    ]  # fmt: skip
    engines = RayResourcePool(
        [1, 1], device="cuda", devices_per_process=8, nodes_per_rank=2, accelerator_type="A100"
    )
    assert [node.node_id for node in choose_nodes(nodes, [engines])] == ["0", "2"]


def test_an_accelerator_type_that_is_missing_is_named() -> None:
    pool = RayResourcePool([2], use_gpu=True, accelerator_type="H100")
    with pytest.raises(NotEnoughDevices, match="2 processes of 1 CPU and 1 GPU of type H100 each") as error:
        choose_nodes(mixed_cluster("A100"), [pool])
    assert "node 10.0.0.0 (A100) has 64 of 64 CPU free" in str(error.value)
    with pytest.raises(ValueError, match="pool 'main' has accelerator_type 'H100' and no accelerators"):
        RayResourcePool([2], accelerator_type="H100")
