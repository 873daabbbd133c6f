"""Joining ranks, and the few facts they tell each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from references.rank_processes import RankFailed, Ranks, leave, run_ranks
from strop.engines.config import EngineConfig
from strop.engines.parallel.process_group import join_ranks
from strop.engines.parallel.ranks import alone

GIVEN = {"rendezvous": None, "device": "cpu"}


def test_one_process_is_alone_and_talks_to_nobody() -> None:
    parallel = join_ranks(rank=0, world_size=1, **GIVEN)  # type: ignore[arg-type]
    assert (parallel.rank, parallel.world_size, parallel.mesh, parallel.sp_group) == (0, 1, None, None)
    assert not dist.is_initialized()
    for one in (parallel, alone("cpu")):
        assert one.max(3) == 3
        one.barrier("nothing")
        assert (one.dp_rank, one.dp_size) == (0, 1)


def facts(ranks: Ranks) -> dict[str, object]:
    first = ranks.join(shard_size=2)
    second = ranks.join(sequence_parallel=2)
    third = ranks.join(sequence_parallel=2)
    second.barrier("the test")
    assert first.mesh is not None
    assert second.mesh is not None
    assert second.sp_group is not None
    return {
        "max": first.max(3 + 10 * ranks.rank),
        "places": (second.dp_rank, second.dp_size),
        "sp": dist.get_process_group_ranks(second.sp_group),
        "shards": first.mesh.mesh.tolist(),
        "names": first.mesh.mesh_dim_names,
        "flat": second.mesh.mesh.tolist(),
        "shared": second.mesh is third.mesh and second.sp_group is third.sp_group,
    }


def test_two_ranks() -> None:
    for seen in run_ranks(facts, 2):
        assert seen["max"] == 13
        assert seen["places"] == (0, 1)
        assert seen["sp"] == [0, 1]
        assert (seen["shards"], seen["names"]) == ([0, 1], ("shard",))
        assert seen["flat"] == [0, 1]
        assert seen["shared"]


@pytest.mark.dist
def test_four_ranks_in_pairs() -> None:
    for rank, seen in enumerate(run_ranks(facts, 4)):
        assert seen["max"] == 33
        assert seen["places"] == (rank // 2, 2)  # neighbours share sequences
        assert seen["sp"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert (seen["shards"], seen["names"]) == ([[0, 1], [2, 3]], ("replicate", "shard"))


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"rank": 2, "world_size": 2}, "rank is 2, but there are 2 ranks, counted from 0"),
        (
            {"rank": 0, "world_size": 6, "engine": EngineConfig(sequence_parallel=4)},
            "engine.sequence_parallel is 4, which does not divide the 6 ranks of the role: choose one of 1, 2, 3, 6",
        ),
        (
            {"rank": 0, "world_size": 4, "engine": EngineConfig(shard_size=3)},
            "engine.shard_size is 3, which does not divide the 4",
        ),
        ({"rank": 0, "world_size": 2}, "rank 0 of 2 was not told where the ranks meet"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        join_ranks(**{**GIVEN, **sizes})  # type: ignore[arg-type]


def join_as_another(ranks: Ranks) -> str:
    ranks.join()
    try:
        Ranks(1 - ranks.rank, 2, ranks.place).join()
    except ValueError as error:
        return str(error)
    return ""


def test_a_process_is_one_rank() -> None:
    assert run_ranks(join_as_another, 2)[0] == (
        "this process is rank 0 of 2 already and cannot also be rank 1 of 2; roles in one process need the same ranks"
    )


def joined_alone(ranks: Ranks) -> bool:
    Ranks(0, 1, ranks.place).join()
    return dist.is_initialized()


def left(_: Ranks) -> bool:
    leave()
    return dist.is_initialized()


@pytest.mark.parametrize("function", [joined_alone, left])
def test_the_group_of_an_earlier_call_is_left(function: Callable[[Ranks], bool]) -> None:
    run_ranks(facts, 2)
    assert run_ranks(function, 2) == [False, False]


def late(ranks: Ranks) -> str:
    parallel = ranks.join(timeout_s=1.0)
    if ranks.rank == 1:
        torch.distributed.destroy_process_group()
        return ""
    try:
        parallel.barrier("the weights of step 7")
    except RuntimeError as error:
        return str(error)
    return "came"


def test_a_barrier_says_what_it_waited_for() -> None:
    assert run_ranks(late, 2)[0].startswith(
        "rank 0 of 2 waited for the others at 'the weights of step 7', and not all came: "
    )


def fail_on_one(ranks: Ranks) -> int:
    if ranks.rank == 1:
        raise KeyError("only here")
    parallel = ranks.join()
    parallel.barrier("what never comes")
    return 0


def test_a_failed_rank_is_named_and_the_next_call_works() -> None:
    with pytest.raises(RankFailed, match=r"fail_on_one: rank 1 of 2 raised\n(.|\n)*KeyError: 'only here'"):
        run_ranks(fail_on_one, 2)
    assert run_ranks(facts, 2)[1]["max"] == 13


def test_a_late_rank_is_named() -> None:
    with pytest.raises(RankFailed, match=r"sleep: ranks \[0\] of 1 gave no result in time"):
        run_ranks(sleep, 1, timeout_s=0.5)


def sleep(ranks: Ranks) -> None:
    time.sleep(30)
