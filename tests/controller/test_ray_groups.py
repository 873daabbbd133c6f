"""Ray worker groups do what inline ones do; three processes with two roles, and two processes apart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray_cluster import shared_cluster
from ray_workers import CPUS, Doubler, batch

from strop.controller import Mesh, Partition, as_list, role
from strop.controller.ray import (
    RayClassWithInitArgs,
    RayPending,
    RayResourcePool,
    RayRuntime,
    RayWorkerGroup,
    Traffic,
    create_colocated_worker_cls,
)
from strop.protocol import DataProto, DataProtoFuture, rows
from strop.utils.allocator import allocator_variables

pytestmark = pytest.mark.timeout(180)


@dataclass
class Stage:
    """The runtime of this module, its groups, and where its processes write."""

    runtime: RayRuntime
    groups: dict[str, Any]
    folder: Path

    def __getitem__(self, name: str) -> Any:
        return self.groups[name]

    @property
    def traffic(self) -> Traffic:
        return self.runtime.traffic


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    shared_cluster()
    folder = tmp_path_factory.mktemp("ray-groups")
    runtime = RayRuntime(
        ranks=3,
        apart={"aside": 2},
        cpus_per_rank=CPUS,
        log_dir=folder,
        env={"ONLY_THERE": "yes"},
        call_timeout_s=60,
    )
    with runtime:
        groups = runtime.groups(
            {"actor": role(Doubler, note=folder / "note"), "critic": role(Doubler, 3, note=folder / "note")}
        )
        groups |= runtime.groups({"judge": role(Doubler, 5)}, pool="aside")
        yield Stage(runtime, groups, folder)
        # An unanswered sign of life is no call: the workers are closed.
        for member in runtime._manager.members:
            runtime._manager.give(
                member, lambda handle: handle.process_info.remote(), method="", timeout_s=60
            )
    closed = sorted(path.name for path in folder.glob("note-*"))
    assert closed == [f"note-{name}-{rank}" for name in ("actor", "critic") for rank in range(3)]


def ids(data: DataProto, name: str) -> list[list[int]]:
    return [row.tolist() for row in rows(data.tensors()[name])]


@pytest.mark.parametrize(("num_rows", "sizes"), [(7, [3, 2, 2]), (2, [1, 1, 0]), (0, [0, 0, 0])])
def test_any_number_of_rows_comes_back_in_order(stage: Stage, num_rows: int, sizes: list[int]) -> None:
    data = batch(num_rows)
    result = stage["actor"].call.double(data, plus=1)
    assert ids(result, "doubled") == [[2 * value + 1 for value in row] for row in ids(data, "ids")]
    assert [place["seen"][-1] for place in stage["actor"].call.where()] == sizes
    assert data.meta_info == {"temperature": 0.7}
    assert set(data.tensors()) == {"ids", "scores"}


def test_a_cut_gives_each_worker_its_rows_and_the_result_is_in_the_order_of_the_batch(stage: Stage) -> None:
    data = batch(7)
    result = stage["actor"].call.double(Partition(data, [[6, 0], [], [1, 2, 3, 5, 4]]))
    assert ids(result, "doubled") == [[2 * value for value in row] for row in ids(data, "ids")]
    assert result.non_tensor_batch["rank"].tolist() == [0, 2, 2, 2, 2, 2, 0]


def test_all_dispatch_modes_answer_as_inline(stage: Stage) -> None:
    actor, data = stage["actor"], batch(7)
    assert as_list(actor.call.count(data)) == [3, 2, 2]
    reverse = actor.call.apply(lambda part: part[::-1], data)
    assert reverse.non_tensor_batch["uid"].tolist() == ["u2", "u1", "u0", "u4", "u3", "u6", "u5"]
    assert actor.call.gather(2).tensors()["from"].tolist() == [0, 0, 1, 1, 2, 2]
    assert actor.call.only_first(5) == 5
    # The registered mode of the test: worker 0 has 1 + 4, worker 1 (2 + 5) * 10, worker 2 3 * 100.
    assert actor.call.add([1, 2, 3, 4, 5]) == 5 + 70 + 300
    assert actor.execute_all_sync("only_first", 1) == [1, 2, 3]
    assert [one.result() for one in actor.execute_all("only_first", 2)] == [2, 3, 4]
    assert actor.execute_rank_zero_sync("only_first", 7) == 7
    assert actor.execute_rank_zero("only_first", 8).result() == 8
    assert [place["rank"] for place in actor.where()] == [0, 1, 2]


def test_ranks_of_one_data_parallel_group_get_the_same_rows_and_one_reports(stage: Stage) -> None:
    wide = stage.runtime.groups({"wide": role(Doubler).on(Mesh(dp=1, tp=3))})["wide"]
    result = wide.call.double(batch(5))
    assert result.non_tensor_batch["rank"].tolist() == [0] * 5
    assert [place["seen"] for place in as_list(wide.call.where())] == [[5]] * 3
    with pytest.raises(
        ValueError, match="role 'odd' has a mesh of 2 workers, but pool 'main' has 3 processes"
    ):
        stage.runtime.groups({"odd": role(Doubler).on(Mesh(dp=2))})
    with pytest.raises(ValueError, match="there is no pool 'elsewhere'; pools: main, aside"):
        stage.runtime.groups({"odd": role(Doubler)}, pool="elsewhere")


def test_roles_of_a_pool_share_processes_and_see_each_other(stage: Stage) -> None:
    actor, critic = stage["actor"].call.where(), stage["critic"].call.where()
    judge = stage["judge"].call.where()
    assert [place["pid"] for place in actor] == [place["pid"] for place in critic]
    assert len({place["pid"] for place in [*actor, *judge]} | {os.getpid()}) == 6
    assert actor[0]["roles"][:2] == ["actor", "critic"]
    assert judge[0]["roles"] == ["judge"]
    assert (actor[0]["made_after"], critic[0]["made_after"]) == ([], ["actor"])
    assert as_list(stage["actor"].call.neighbour_factor("critic")) == [3, 3, 3]


def test_processes_know_their_place_before_anything_is_imported(stage: Stage) -> None:
    places = stage["actor"].call.where()
    assert [(place["rank"], place["local_rank"], place["local_world_size"]) for place in places] == [
        (0, 0, 3),
        (1, 1, 3),
        (2, 2, 3),
    ]
    for rank, place in enumerate(places):
        seen = place["environment"]
        expected = {
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(places[0]["port"]),
            "WG_PREFIX": "main",
            "WG_BACKEND": "ray",
            "CUDA_VISIBLE_DEVICES": "",
            "ONLY_THERE": "yes",
            **allocator_variables(os.environ),
        }
        assert {name: seen.get(name) for name in expected} == expected
        assert int(seen["OMP_NUM_THREADS"]) >= 1
    assert places[0]["port"] > 0
    assert "ONLY_THERE" not in os.environ
    assert stage["judge"].call.where()[1]["environment"]["MASTER_PORT"] != str(places[0]["port"])
    assert (stage.folder / "aside-1.log").is_file()


def test_chained_calls_pass_references_and_no_rows(stage: Stage) -> None:
    # 40 rows of 1024 numbers are 160 KiB of rows; the controller must see none of them.
    data = DataProto.from_dict({"ids": torch.zeros(40, 1)})
    before = (stage.traffic.sent_bytes, stage.traffic.received_bytes)
    future = stage["actor"].call.add_columns(data)
    assert len(future) == 40
    assert future.wait() is future
    result = stage["judge"].call.sum_heavy(future.select(["heavy"]))
    sent, received = stage.traffic.sent_bytes - before[0], stage.traffic.received_bytes - before[1]
    assert 160 <= sent < 1000
    assert received == 160
    assert result.tensors()["sums"].shape == (40,)
    # Row i of the part of rank r holds 1024 consecutive numbers from 1024 i on, plus r; parts have 14, 13, 13.
    first = [sum(range(1024 * row, 1024 * (row + 1))) for row in range(14)]
    expected = [*first, *(value + 1024 for value in first[:13]), *(value + 2048 for value in first[:13])]
    torch.testing.assert_close(result.tensors()["sums"], torch.tensor(expected, dtype=torch.float32))


def test_metrics_come_to_the_controller_and_the_rows_beside_them_do_not(stage: Stage) -> None:
    before = stage.traffic.received_bytes
    result = stage["actor"].call.add_columns_and_count(
        Partition(DataProto.from_dict({"ids": torch.zeros(60, 1)}), [[*range(1, 60)], [0], []])
    )
    assert result.metrics == (59, 1, 0)
    assert stage.traffic.received_bytes - before == 3 * 8
    assert isinstance(result.batch, DataProtoFuture)
    heavy = result.batch.select(["heavy"], []).get().tensors()["heavy"]
    assert heavy[:2, 0].tolist() == [1.0, 0.0], "row 0 is the first of rank 1"
    alone = stage["actor"].execute_rank_zero_sync(
        "add_columns_and_count", DataProto.from_dict({"ids": torch.zeros(2, 1)})
    )
    assert alone.metrics == (2,)
    assert alone.batch.tensors()["light"].tolist() == [1.0, 1.0]


def test_the_controller_fetches_the_columns_it_asks_for_and_no_others(stage: Stage) -> None:
    future = stage["actor"].call.add_columns(DataProto.from_dict({"ids": torch.zeros(60, 1)}))
    before = stage.traffic.received_bytes
    assert future.select(["light"], []).get().tensors()["light"].tolist() == [1.0] * 60
    assert stage.traffic.received_bytes - before == 60 * 4
    assert future.select(["heavy"], []).get().tensors()["heavy"].shape == (60, 1024)
    assert stage.traffic.received_bytes - before == 60 * 4 + 60 * 4096


def test_a_future_unites_with_a_batch_and_is_cut_for_another_number_of_workers(stage: Stage) -> None:
    data = batch(7)
    future = stage["actor"].call.start_double(data)
    united = future.select(["doubled"], []).union(data.select(["ids"], ["uid"]))
    again = stage["judge"].call.double(united)
    assert ids(again, "doubled") == [[5 * value for value in row] for row in ids(data, "ids")]
    assert again.non_tensor_batch["rank"].tolist() == [0, 0, 0, 0, 1, 1, 1]
    kinds = stage["judge"].call.kind(future)
    assert kinds.non_tensor_batch["kind"].tolist() == [DataProtoFuture.__name__] * 7
    assert ids(future.take([6, 0]).get(), "doubled") == [[12], [0]]


def test_an_argument_for_several_workers_is_stored_once(stage: Stage) -> None:
    numbers = torch.ones(100_000)
    before = stage.traffic.sent_bytes
    assert as_list(stage["actor"].call.size_of(numbers)) == [(100_000.0, True)] * 3
    assert stage.traffic.sent_bytes - before == 400_000
    numbers.add_(1)
    assert as_list(stage["actor"].call.size_of(numbers))[2] == (200_000.0, True)


def test_results_are_waited_for_one_by_one_and_in_any_order(stage: Stage) -> None:
    pending = stage["actor"].execute_all_async("double", batch(3))
    assert all(isinstance(one, RayPending) for one in pending)
    assert [len(one.result()) for one in reversed(pending)] == [3, 3, 3]
    assert pending[1].contents().num_rows == 3
    number = stage["actor"].execute_rank_zero_async("only_first", 1)
    with pytest.raises(TypeError, match="actor.only_first returned no batch, so it has no rows"):
        number.contents()


def test_what_a_worker_does_not_have_is_said_without_asking_it(stage: Stage) -> None:
    with pytest.raises(AttributeError, match="Doubler.close is not marked with @register"):
        stage["actor"].bound("close")


@pytest.mark.slow
def test_groups_under_the_names_of_verl(tmp_path: Path) -> None:
    shared_cluster()
    pool = RayResourcePool(
        [1], use_gpu=False, name_prefix="pool", max_colocate_count=2, cpus_per_process=CPUS
    )
    wrapped = ray.remote(Doubler)
    fused = create_colocated_worker_cls(
        {"left": RayClassWithInitArgs(cls=Doubler, factor=3), "right": RayClassWithInitArgs(wrapped, 4)}
    )
    with (
        RayWorkerGroup(pool, RayClassWithInitArgs(wrapped, factor=6), "alone", log_dir=tmp_path) as alone,
        RayWorkerGroup(pool, fused, name_prefix="fused", log_dir=tmp_path) as both,
    ):
        assert len(pool.get_placement_groups()) == 1
        assert ids(alone.double(batch(3)), "doubled") == [[0], [6, 6], [12, 12, 12]]
        place = alone.where()[0]
        assert (place["environment"]["WG_PREFIX"], place["roles"]) == ("alone", ["alone"])
        assert (tmp_path / "alone-0.log").is_file()
        groups = both.spawn(prefix_set={"right", "left"})
        assert list(groups) == ["left", "right"]
        assert [ids(group.double(batch(2)), "doubled")[1] for group in groups.values()] == [[3, 3], [4, 4]]
        assert groups["left"].where()[0]["pid"] == groups["right"].where()[0]["pid"] != place["pid"]
        with pytest.raises(ValueError, match="no role 'middle' in this group; its roles: left, right"):
            both.spawn({"middle"})
        with pytest.raises(ValueError, match="has a mesh of 2 workers, but pool 'pool' has 1"):
            RayWorkerGroup(pool, role(Doubler).on(Mesh(dp=2)), log_dir=tmp_path)
        with pytest.raises(AttributeError, match="several roles, so double has to be called on one of them"):
            both.double(batch(1))
        with pytest.raises(ValueError, match="pool 'pool' is in use by another group"):
            RayWorkerGroup(pool, role(Doubler), detached=True, name="kept", log_dir=tmp_path)
        both.close()
        assert len(pool.get_placement_groups()) == 1, "the first group still has them"
        assert len(alone.double(batch(1))) == 1
    with pytest.raises(RuntimeError, match="the places of pool 'pool' are not taken"):
        pool.get_placement_groups()
    with pytest.raises(ValueError, match="a detached group needs a name"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Doubler), detached=True)


def test_what_tells_a_process_its_place_cannot_be_given() -> None:
    with pytest.raises(
        ValueError, match="env names RANK, WORLD_SIZE, which the group sets in each of its processes"
    ):
        RayRuntime(ranks=2, env={"RANK": "0", "WORLD_SIZE": "1", "MINE": "yes"})
