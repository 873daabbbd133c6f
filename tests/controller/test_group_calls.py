"""What a group asks of a runtime, and what it makes of the answers: seen with a runtime that runs late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_groups import inline_group

from strop.controller import (
    Dispatch,
    DispatchMode,
    Execute,
    InlineWorkerGroup,
    Mesh,
    Partition,
    Placement,
    ResultFuture,
    Returns,
    Worker,
    WorkerCall,
    WorkerGroup,
    as_list,
    placed,
    register,
    register_dispatch_mode,
)
from strop.controller import dispatch_modes as dispatch_module
from strop.controller.ray.future import BatchSummary, DataProtoFuture
from strop.protocol import BatchError, DataProto, jagged, rows


class Scorer(Worker):
    """Tells which rows each worker saw."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, data: DataProto, other: DataProto | None = None) -> DataProto:
        self.seen.append(data.tensors()["n"].tolist())
        if other is not None:
            self.seen.append(other.tensors()["n"].tolist())
        metrics = {"metrics": {"rows": len(data)}}
        if not len(data):
            return DataProto(meta_info=metrics)
        return DataProto.from_dict(
            {
                "squares": data.tensors()["n"] ** 2,
                "tens": jagged([row * 10 for row in rows(data.tensors()["ids"])]),
            },
            {"worker": [self.rank] * len(data)},
            metrics,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def start_score(self, data: DataProto) -> DataProto:
        return self.score(data)

    @register(dispatch_mode=Dispatch.MEGATRON_PP_AS_DP_PROTO)
    def score_in_stages(self, data: DataProto) -> DataProto:
        return self.score(data)

    @register(dispatch_mode="MEGATRON_COMPUTE_PROTO")
    def score_under_verls_name(self, data: DataProto) -> DataProto:
        return self.score(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Callable[[DataProto], DataProto], data: DataProto) -> DataProto:
        return function(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def total(self, data: DataProto) -> int:
        return int(data.tensors()["n"].sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, blocking=False)
    def start_total(self, data: DataProto) -> int:
        return self.total(data)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def first(self, data: DataProto, scale: int = 1) -> list[int]:
        assert isinstance(data, DataProto)
        return [self.rank, *(data.tensors()["n"] * scale).tolist()]

    @register(dispatch_mode=Dispatch.RANK_ZERO, blocking=False)
    def start_first(self, data: DataProto) -> list[int]:
        return self.first(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole(self, data: DataProto) -> int:
        return len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def own(self, data: DataProto) -> int:
        return len(data)

    @register(dispatch_mode=Dispatch.DP_GATHER_PROTO)
    def produce(self, count: int, prompts: DataProto | None = None) -> DataProto:
        extra = 0 if prompts is None else len(prompts)
        return numbered(range(self.dp_rank * 10, self.dp_rank * 10 + (count + extra) * (self.dp_rank + 1)))

    @register(dispatch_mode=Dispatch.DP_GATHER_PROTO, blocking=False)
    def start_produce(self, count: int) -> DataProto:
        return self.produce(count)

    @register(dispatch_mode=Dispatch.DP_GATHER_PROTO, execute_mode=Execute.RANK_ZERO, blocking=False)
    def produce_first(self, count: int) -> DataProto:
        return self.produce(count)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def fail_on(self, data: DataProto, rank: int) -> DataProto:
        if self.rank == rank:
            raise RuntimeError(f"worker {rank} is broken")
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count_or_fail_on(self, data: DataProto, rank: int) -> int:
        return len(self.fail_on(data, rank))


class Answer:
    """A call of the late runtime: the method runs when somebody waits, and says what was moved."""

    def __init__(self, run: Callable[[], Any], returns: Returns, log: list[str], name: str) -> None:
        self.run, self.returns, self.log, self.name = run, returns, log, name
        self.value: Any = self

    def _compute(self) -> Any:
        if self.value is self:
            self.log.append(f"{self.name} ran")
            self.value = self.run()
        return self.value

    def result(self) -> Any:
        value = self._compute()
        if self.returns is not Returns.NOTHING:
            self.log.append(f"{self.name} moved")
        return value

    def contents(self) -> BatchSummary:
        assert self.returns is Returns.ROWS, "only a batch has rows"
        return BatchSummary.of(self._compute())

    def columns(self, batch_keys: Sequence[str], non_tensor_batch_keys: Sequence[str]) -> DataProto:
        rows: DataProto = self.result()
        return rows.select(batch_keys, non_tensor_batch_keys)


class LateGroup(WorkerGroup[Scorer]):
    """Workers in this process whose methods run when their results are waited for."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(Scorer, mesh)
        self.log: list[str] = []
        self.arguments: list[Sequence[Any]] = []
        self.workers = []
        for rank in range(mesh.world_size):
            with placed(Placement(rank=rank, mesh=mesh)):
                self.workers.append(Scorer())

    def submit(self, calls: Sequence[WorkerCall]) -> list[Any]:
        return [self.answer(call) for call in calls]

    def joined(self, outputs: Sequence[Any], partition: Partition | None) -> DataProto:
        return DataProtoFuture(outputs, partition)

    def answer(self, call: WorkerCall) -> Answer:
        self.arguments.append(call.args)
        name = f"{call.method} on {call.rank}"
        return Answer(lambda: call.run(self.workers[call.rank]), call.returns, self.log, name)


def numbered(numbers: Sequence[int]) -> DataProto:
    column = [torch.full((number % 3,), number) for number in numbers]
    return DataProto.from_dict(
        {"n": torch.tensor(list(numbers)), "ids": jagged(column)}, {"uid": list(numbers)}
    )


def inline(dp: int) -> InlineWorkerGroup[Scorer]:
    return inline_group(Scorer, world_size=dp)


def ns(data: DataProto, name: str = "n") -> list[int]:
    return list(data.get().tensors()[name].tolist())


# ---- a batch cut by its caller


@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(1, 9), dp=st.integers(1, 4), is_future=st.booleans(), data=st.data())
def test_results_of_a_cut_come_back_in_the_callers_order(
    num_rows: int, dp: int, is_future: bool, data: Any
) -> None:
    batch = numbered(range(100, 100 + num_rows))
    homes = data.draw(st.lists(st.integers(0, dp - 1), min_size=num_rows, max_size=num_rows))
    shuffled = data.draw(st.permutations(range(num_rows)))
    parts = [[row for row in shuffled if homes[row] == home] for home in range(dp)]
    partition = Partition(DataProtoFuture.concat(batch.chunk(2)) if is_future else batch, parts)
    assert len(partition) == num_rows
    workers = inline(dp)
    result = workers.call.score(partition)
    assert ns(result, "squares") == [number**2 for number in ns(batch)]
    assert [row.tolist() for row in rows(result.tensors()["tens"])] == [
        [number * 10] * (number % 3) for number in ns(batch)
    ]
    assert result.non_tensor_batch["worker"].tolist() == homes
    assert [worker.seen[0] for worker in workers.workers] == [[100 + row for row in part] for part in parts]
    assert result.meta_info["metrics"] == {"rows": [len(part) for part in parts]}


def test_all_batches_of_a_call_are_cut_alike() -> None:
    workers = inline(2)
    left, right = numbered(range(4)), numbered(range(10, 14))
    partition = Partition(left, [[3, 0, 1], [2]])
    assert ns(workers.call.score(partition, other=right), "squares") == [0, 1, 4, 9]
    assert [worker.seen for worker in workers.workers] == [[[3, 0, 1], [13, 10, 11]], [[2], [12]]]
    again = Partition(DataProtoFuture.from_local(right), [[3, 0, 1], [2]])
    assert ns(workers.call.score(partition, other=again), "squares") == [0, 1, 4, 9]
    with pytest.raises(ValueError, match="two arguments of one call are cut into different parts"):
        workers.call.score(partition, other=Partition(right, [[0, 1, 3], [2]]))
    with pytest.raises(ValueError, match=r"cut alike, but they have \[3, 4\] rows"):
        workers.call.score(partition, other=numbered(range(3)))


def test_a_cut_goes_with_functions_and_metrics_too() -> None:
    workers = inline(3)
    partition = Partition(numbered(range(5)), [[4, 0], [], [2, 1, 3]])
    assert ns(workers.call.apply(lambda data: data, partition)) == [0, 1, 2, 3, 4]
    assert as_list(workers.call.total(partition)) == [4, 0, 6]  # one for each part, in the order of the parts


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[0, 1], [3]], "1 of 4 rows are in no part of a Partition, the first is row 2"),
        ([[0, 1, 2], [3, 1]], "row 1 is twice in a Partition: in part 0 and in part 1"),
        ([[0, 1, 2], [3, 4]], "part 1 of a Partition has row 4, but the batch has 4 rows"),
        ([[0, 1, 2, 3, -1]], "part 0 of a Partition has row -1"),
        ([[0.0, 1.0], [2, 3]], "part 0 of a Partition is a list of row numbers, got"),
        ([[True, False, True, True]], "part 0 of a Partition is a list of row numbers, got"),
        ([0, 1, 2, 3], "part 0 of a Partition is a list of row numbers, got 0"),
    ],
)
@pytest.mark.parametrize(
    "hold", [numbered(range(4)), DataProtoFuture.from_local(numbered(range(4)))], ids=["batch", "future"]
)
def test_a_cut_has_each_row_once(hold: DataProto, parts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Partition(hold, parts)


def test_a_cut_fits_the_group_and_the_mode() -> None:
    partition = Partition(numbered(range(3)), [[0], [2], [1]])
    with pytest.raises(ValueError, match="a Partition has 3 parts, but the group has 2 data-parallel groups"):
        inline(2).call.score(partition)
    for method in ("whole", "first"):
        with pytest.raises(TypeError, match=f"argument 0 of {method} is a Partition, but dispatch mode"):
            inline(3).bound(method)(partition)
    with pytest.raises(
        TypeError, match="'prompts' of produce is a Partition, but dispatch mode 'DP_GATHER_PROTO'"
    ):
        inline(3).call.produce(1, prompts=partition)
    assert ns(inline(3).call.score(partition), "squares") == [0, 1, 4]


def test_a_method_that_returns_other_rows_cannot_be_put_in_order() -> None:
    partition = Partition(numbered(range(3)), [[2, 0], [1]])
    with pytest.raises(BatchError, match="part 1 of a result has 2 rows, but 1 rows were asked of it"):
        inline(2).call.apply(lambda data: data.repeat(2) if len(data) == 1 else data, partition)
    facts = inline(2).call.apply(
        lambda data: DataProto(meta_info={"metrics": {"rows": len(data)}}), partition
    )
    assert facts.meta_info["metrics"] == {"rows": [2, 1]}


# ---- what is started, waited for and moved


def test_a_non_blocking_call_moves_and_waits_for_nothing() -> None:
    group = LateGroup(Mesh(dp=2))
    data = numbered(range(5))
    future = group.call.start_score(Partition(data, [[4, 1], [0, 2, 3]]))
    assert group.log == []
    assert len(future) == 5
    assert group.log == ["start_score on 0 ran", "start_score on 1 ran"]
    second = future.chunk(5)[1]
    assert ns(second, "squares") == [1]
    assert group.log[2:] == ["start_score on 0 moved"]


def test_a_chain_of_calls_moves_rows_from_worker_to_worker_only() -> None:
    group, next_group = LateGroup(Mesh(dp=2)), LateGroup(Mesh(dp=2))
    data = numbered(range(4))
    squares = group.call.start_score(data)
    chained = squares.select(["squares"], []).union(data)
    last = next_group.call.start_score(chained)
    assert group.log == ["start_score on 0 ran", "start_score on 1 ran"]  # counted, not fetched
    assert next_group.log == []
    assert ns(last, "squares") == [0, 1, 4, 9]
    assert group.log[2:] == ["start_score on 0 moved", "start_score on 1 moved"]  # each by one worker


def test_ranks_of_one_data_parallel_group_are_given_the_same_object() -> None:
    group = LateGroup(Mesh(dp=2, tp=2))
    for data in (numbered(range(4)), DataProtoFuture.from_local(numbered(range(4)))):
        group.arguments.clear()
        group.call.start_score(data)
        given = [args[0] for args in group.arguments]
        assert given[0] is given[1]
        assert given[2] is given[3]
        assert given[0] is not given[2]


@settings(max_examples=20, deadline=None)
@given(num_rows=st.integers(1, 7), sizes=st.lists(st.integers(1, 2), min_size=5, max_size=5), data=st.data())
def test_any_mesh_gives_what_one_worker_gives(num_rows: int, sizes: list[int], data: Any) -> None:
    dp, tp, pp, cp, sp = sizes
    mesh = Mesh(dp=dp, tp=tp, pp=pp, cp=cp, sp=sp)
    workers = inline_group(Scorer, mesh=mesh)
    batch = numbered(range(num_rows))
    at = data.draw(st.integers(0, num_rows))
    shuffled = data.draw(st.permutations(range(num_rows)))
    parts = [shuffled] if dp == 1 else [shuffled[:at], shuffled[at:]]
    result = workers.call.score(Partition(DataProtoFuture.concat(batch.chunk(2)), parts))
    assert ns(result, "squares") == [number**2 for number in range(num_rows)]
    for rank, worker in enumerate(workers.workers):
        assert worker.seen == [parts[mesh.dp_rank(rank)]]
    assert as_list(workers.call.total(batch)) == [sum(ns(chunk)) for chunk in batch.chunk(dp)]


def test_stages_of_a_pipeline_get_rows_of_their_own_where_the_mode_says_so() -> None:
    workers = inline_group(Scorer, mesh=Mesh(dp=2, tp=2, pp=2))  # ranks 0, 2, 4 and 6 report
    result = workers.call.score_in_stages(numbered(range(7)))
    assert [worker.seen for worker in workers.workers] == [
        [row] for row in ([0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6], [6])
    ]
    assert ns(result, "squares") == [number**2 for number in range(7)]
    assert result.non_tensor_batch["worker"].tolist() == [0, 0, 2, 2, 4, 4, 6]
    parts = [[6], [], [5, 4, 3], [0, 1, 2]]
    shuffled = workers.call.score_in_stages(Partition(numbered(range(7)), parts))
    assert ns(shuffled, "squares") == [number**2 for number in range(7)]
    assert workers.workers[5].seen[-1] == [5, 4, 3]
    with pytest.raises(ValueError, match="a Partition has 2 parts, but the group has 4 data-parallel groups"):
        workers.call.score_in_stages(Partition(numbered(range(7)), [[0, 1, 2], [3, 4, 5, 6]]))


def test_verls_name_for_megatrons_workers_cuts_rows_over_the_mesh() -> None:
    assert Dispatch.MEGATRON_COMPUTE_PROTO is Dispatch.DP_COMPUTE_PROTO
    workers = inline_group(Scorer, mesh=Mesh(dp=2, pp=2))
    assert ns(workers.call.score_under_verls_name(numbered(range(3))), "squares") == [0, 1, 4]
    assert [worker.seen for worker in workers.workers] == [[[0, 1]], [[2]], [[0, 1]], [[2]]]


def test_results_of_ranks_that_do_not_report_stay_in_the_worker() -> None:
    mesh = Mesh(dp=2, tp=2, pp=2)  # ranks 4 and 6 report
    group = LateGroup(mesh)
    group.call.score(numbered(range(4)))
    assert sorted(entry for entry in group.log if entry.endswith("moved")) == [
        "score on 4 moved",
        "score on 6 moved",
    ]
    assert len([entry for entry in group.log if entry.endswith("ran")]) == 8  # each is waited for
    group.log.clear()
    assert as_list(group.call.total(numbered(range(4)))) == [1, 5]
    assert len([entry for entry in group.log if entry.endswith("moved")]) == 2
    started: object = group.call.start_total(numbered(range(4)))
    assert isinstance(started, ResultFuture)
    assert started.get() == [1, 5]


def test_an_error_of_a_rank_that_does_not_report_is_raised() -> None:
    for rank in range(4):
        with pytest.raises(RuntimeError, match=f"worker {rank} is broken"):
            LateGroup(Mesh(dp=2, tp=2)).call.fail_on(numbered(range(3)), rank)
        with pytest.raises(RuntimeError, match=f"worker {rank} is broken"):
            LateGroup(Mesh(dp=2, tp=2)).call.count_or_fail_on(numbered(range(3)), rank)


def test_what_the_others_return_is_not_kept() -> None:
    class Big:
        alive = 0

        def __init__(self) -> None:
            Big.alive += 1

        def __del__(self) -> None:
            Big.alive -= 1

    class Maker(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, blocking=False)
        def make(self, data: DataProto) -> Big:
            return Big()

    held: object = inline_group(Maker, mesh=Mesh(dp=2, tp=3)).call.make(numbered(range(2)))
    assert Big.alive == 2
    assert isinstance(held, ResultFuture)
    assert len(held.get()) == 2


# ---- the first worker alone, and batches that arise in the workers


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=3), Mesh(dp=2, pp=2)])
def test_rank_zero_takes_batches_and_futures(mesh: Mesh) -> None:
    group = LateGroup(mesh)
    data = numbered(range(3))
    parts = DataProtoFuture.concat(data.chunk(2))
    assert group.call.first(data) == [0, 0, 1, 2] == group.call.first(parts)
    assert group.call.first(parts.take([2]), scale=5) == [0, 10]
    started: object = group.call.start_first(parts)
    assert isinstance(started, ResultFuture)
    assert started.get() == [0, 0, 1, 2]
    assert {entry.split()[2] for entry in group.log} == {"0"}
    assert inline_group(Scorer, mesh=mesh).call.first(parts) == [0, 0, 1, 2]


def test_batches_that_arise_in_the_workers_are_gathered_in_the_order_of_the_groups() -> None:
    # Group 0 makes 0, 1; group 1 makes 10, 11, 12, 13: as many workers as the mesh has give the same rows.
    for mesh in (Mesh(dp=2), Mesh(dp=2, tp=2), Mesh(dp=2, pp=2)):
        group = LateGroup(mesh)
        assert ns(group.call.produce(2)) == [0, 1, 10, 11, 12, 13]
        assert ns(group.call.produce(1, prompts=numbered([7]))) == [0, 1, 10, 11, 12, 13]
        assert ns(group.call.start_produce(1)) == [0, 10, 11]
        assert ns(inline_group(Scorer, mesh=mesh).call.produce(2)) == [0, 1, 10, 11, 12, 13]
        assert ns(group.call.produce_first(2)) == [0, 1]


def test_a_worker_may_be_given_a_batch_each() -> None:
    workers = inline(2)
    each: Any = [numbered(range(2)), DataProtoFuture.from_local(numbered(range(5)))]
    assert as_list(workers.call.own(each)) == [2, 5]


def test_results_of_a_joining_mode_are_batches() -> None:
    for group in (inline(2), LateGroup(Mesh(dp=2))):
        with pytest.raises(TypeError, match="worker 0 returned int, but this dispatch mode joins DataProtos"):
            group.call.apply(len, numbered(range(2)))  # type: ignore[arg-type]


def test_a_deadline_can_be_set_for_the_calls_of_a_group() -> None:
    group = inline(1)
    assert group.call_timeout_s is None
    group.call_timeout_s = 0.001  # not enforced here: the worker runs in the caller's thread
    assert group.call.first(numbered([1])) == [0, 1]


# ---- modes of the user


def backwards(group: Any, data: DataProto) -> Any:
    """The last rows go to the first group."""
    chunks = data.chunk(group.mesh.dp)[::-1]
    return ([chunks[group.mesh.dp_rank(rank)] for rank in range(group.world_size)],), {}


def test_a_user_mode_may_join_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_module, "MODES", dict(dispatch_module.MODES))
    register_dispatch_mode("backwards", backwards, cuts_rows=True, joins_rows=True)

    class Mine(Worker):
        @register(dispatch_mode="backwards")
        def by_name(self, data: DataProto) -> DataProto:
            return data

        @register(dispatch_mode={"dispatch_fn": backwards, "joins_rows": True}, blocking=False)
        def by_functions(self, data: DataProto) -> DataProto:
            return data

        @register(dispatch_mode={"dispatch_fn": backwards, "collect_fn": sums, "reporters_only": True})
        def heard(self, data: DataProto) -> int:
            return len(data)

    workers = inline_group(Mine, mesh=Mesh(dp=2, tp=2))
    data = numbered(range(5))
    assert ns(workers.call.by_name(data)) == [3, 4, 0, 1, 2]
    assert ns(workers.call.by_functions(data)) == [3, 4, 0, 1, 2]
    assert workers.call.heard(data) == 5
    with pytest.raises(ValueError, match="would drop all parts but the first"):
        register(dispatch_mode="backwards", execute_mode=Execute.RANK_ZERO)


def sums(group: Any, outputs: list[int]) -> int:
    return sum(outputs)


def test_a_mode_collects_or_joins() -> None:
    with pytest.raises(ValueError, match="'mine' has neither of collect_fn and joins_rows=True"):
        DispatchMode(name="mine", dispatch_fn=backwards)
    with pytest.raises(ValueError, match="'mine' has both of collect_fn and joins_rows=True"):
        register_dispatch_mode("mine", backwards, sums, joins_rows=True)
    with pytest.raises(ValueError, match="keys dispatch_fn and collect_fn, got"):
        register(dispatch_mode={"dispatch_fn": backwards, "collects_fn": sums})
