from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from strop.controller.ray import RayResourcePool
from strop.controller.ray.cluster import Node
from strop.controller.ray.errors import NotEnoughDevices
from strop.controller.ray.pool import choose_nodes


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
