from __future__ import annotations

import pytest

from strop.controller.ray import RayResourcePool


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
