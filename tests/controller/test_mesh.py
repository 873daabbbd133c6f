from __future__ import annotations

import pytest

from strop.controller import Mesh


def test_ranks_count_with_tp_fastest_and_pp_slowest() -> None:
    # dp 2, tp 2, pp 2: rank = pp * 4 + dp * 2 + tp.
    mesh = Mesh(dp=2, tp=2, pp=2)
    assert mesh.world_size == 8
    assert [mesh.dp_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    # tp 0 of the last stage reports: ranks 4 (dp 0) and 6 (dp 1).
    assert [rank for rank in range(8) if mesh.has_output(rank)] == [4, 6] == mesh.output_ranks()


def test_one_worker_of_each_data_parallel_group_reports() -> None:
    mesh = Mesh(dp=3, tp=2, pp=2, cp=2, sp=2)
    assert mesh.world_size == 48
    assert [mesh.dp_rank(rank) for rank in mesh.output_ranks()] == [0, 1, 2]


def test_stages_count_as_data_parallel_groups_where_each_has_a_whole_model() -> None:
    mesh = Mesh(dp=2, tp=2, pp=2)
    stages = mesh.stages_as_dp
    assert stages == Mesh(dp=4, tp=2)
    assert [stages.dp_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert stages.output_ranks() == [0, 2, 4, 6]


def test_axes_and_ranks_outside_the_mesh_are_refused() -> None:
    with pytest.raises(ValueError, match="axis tp has size 0"):
        Mesh(tp=0)
    with pytest.raises(ValueError, match="rank 2 is not in a mesh of 2 workers"):
        Mesh(dp=2).dp_rank(2)
