from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_groups import inline_group
from torch import Tensor

from strop.controller import (
    BatchAndMetrics,
    Dispatch,
    Execute,
    InlineWorkerGroup,
    Mesh,
    Partition,
    ResultFuture,
    Worker,
    as_list,
    register,
    register_dispatch_mode,
)
from strop.controller import dispatch_modes as dispatch_module
from strop.controller.ray.future import DataProtoFuture
from strop.protocol import DataProto, jagged, rows


class Doubler(Worker):
    """Doubles the column ids and remembers what it saw."""

    def __init__(self, factor: int = 2) -> None:
        self.factor = factor
        self.seen: list[Any] = []
        self.rank_at_start = self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto, plus: int = 0) -> DataProto:
        self.seen.append(data.non_tensor_batch["uid"].tolist())
        return DataProto.from_dict({"doubled": data.tensors()["ids"] * self.factor + plus})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def start_double(self, data: DataProto) -> DataProto:
        return self.double(data).union(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Callable[[DataProto], DataProto], data: DataProto) -> DataProto:
        return function(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def count(self, data: DataProto) -> int:
        return len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_AND_METRIC)
    def double_and_count(self, data: DataProto) -> BatchAndMetrics[int]:
        return BatchAndMetrics(batch=self.double(data), metrics=(len(data),))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_AND_METRIC)
    def doubles_without_metrics(self, data: DataProto) -> DataProto:
        return self.double(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def where(self, *args: Any, **kwargs: Any) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
        return self.rank, args, kwargs

    @register()
    def echo(self, value: Any) -> Any:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def start_where(self) -> int:
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def each(self, value: int, scale: int = 1) -> int:
        return value * scale + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def only_first(self, value: int) -> int:
        self.seen.append(value)
        return value + self.rank

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def first(self, value: int) -> int:
        self.seen.append(value)
        return value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def meddle(self, data: DataProto) -> DataProto:
        assert data.batch is not None
        data.batch["extra"] = torch.zeros(len(data))
        data.pop(["ids"])
        data.non_tensor_batch["uid"][:] = "mine"
        data.meta_info["temperature"] = 0.0
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def write_ids(self, data: DataProto) -> DataProto:
        data.tensors()["ids"].values().add_(1)  # type: ignore[operator]
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def returns_a_number(self, data: DataProto) -> int:
        return len(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, materialize_futures=False)
    def kind(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(non_tensors={"kind": [type(data).__name__]})

    def unmarked(self) -> int:
        return 1


class Tripler(Doubler):
    """Overrides a marked method without a mark of its own."""

    def double(self, data: DataProto, plus: int = 0) -> DataProto:
        return DataProto.from_dict({"doubled": data.tensors()["ids"] * 3})


def batch(num_rows: int) -> DataProto:
    ids = jagged([torch.arange(number % 4) + number for number in range(num_rows)] or [torch.zeros(0)])
    data = DataProto.from_dict(
        {"ids": ids},
        {"uid": [f"e0-{number:06d}" for number in range(max(num_rows, 1))]},
        {"temperature": 0.7},
    )
    return data[:num_rows]


def group(world_size: int = 1, mesh: Mesh | None = None) -> InlineWorkerGroup[Doubler]:
    return inline_group(Doubler, world_size=world_size, mesh=mesh)


def ids(data: DataProto, name: str) -> list[list[int]]:
    return [row.tolist() for row in rows(data.tensors()[name])]


@settings(max_examples=25, deadline=None)
@given(num_rows=st.integers(0, 11), world_size=st.integers(1, 5))
def test_rows_come_back_in_order_for_any_number_of_workers(num_rows: int, world_size: int) -> None:
    data = batch(num_rows)
    workers = group(world_size)
    result = workers.call.double(data, plus=1)
    assert ids(result, "doubled") == [[2 * value + 1 for value in row] for row in ids(data, "ids")]
    sizes = [len(worker.seen[0]) for worker in workers.workers]
    assert sum(sizes) == num_rows
    assert max(sizes) - min(sizes) <= 1
    seen = chain.from_iterable(worker.seen[0] for worker in workers.workers)
    assert list(seen) == data.non_tensor_batch["uid"].tolist()


def test_the_callers_batch_has_the_same_rows_after_the_call() -> None:
    # A38: the reference pads the caller's 10 rows to 12 for 4 workers, in place.
    data = batch(10)
    before = (len(data), ids(data, "ids"), data.non_tensor_batch["uid"].tolist())
    result = group(4).call.double(data)
    assert len(result) == 10
    assert (len(data), ids(data, "ids"), data.non_tensor_batch["uid"].tolist()) == before


def test_a_worker_that_changes_its_batch_does_not_change_the_callers() -> None:
    for world_size in (1, 2):
        data = batch(3)
        group(world_size).call.meddle(data)
        assert set(data.tensors()) == {"ids"}
        assert data.meta_info == {"temperature": 0.7}
        assert data.non_tensor_batch["uid"].tolist() == ["e0-000000", "e0-000001", "e0-000002"]


def test_a_worker_that_writes_into_a_column_is_found_out() -> None:
    with pytest.raises(RuntimeError, match=r"Doubler.write_ids wrote into column 'ids' of the batch"):
        group().call.write_ids(batch(3))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_lists_mean_the_same_for_any_number_of_workers(world_size: int) -> None:
    # A29: the reference cuts lists over the workers when their length happens to be the number of workers.
    workers = group(world_size)
    assert workers.execute_all_sync("echo", [10, 20]) == [[10, 20]] * world_size
    assert workers.call.echo([10, 20]) == [[10, 20]] * world_size
    assert as_list(workers.call.where([1, 2], key=[3, 4])) == [
        (rank, ([1, 2],), {"key": [3, 4]}) for rank in range(world_size)
    ]


def test_dp_compute_takes_one_entry_per_worker() -> None:
    workers = group(2)
    assert workers.call.each([10, 20], scale=[1, 2]) == [10, 41]  # type: ignore[arg-type, comparison-overlap]
    with pytest.raises(ValueError, match="list of 2 entries, one per worker, for argument 0, got 3 entries"):
        workers.call.each([1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="for argument 'scale', got int"):
        workers.call.each([1, 2], scale=5)  # type: ignore[arg-type]


def test_metrics_are_a_list_with_one_entry_per_part() -> None:
    assert as_list(group(3).call.count(batch(7))) == [3, 2, 2]


def test_metrics_stand_beside_the_joined_batch() -> None:
    result = group(3).call.double_and_count(Partition(batch(4), [[3, 0], [], [1, 2]]))  # type: ignore[arg-type]
    assert result.metrics == (2, 0, 2)
    assert ids(result.batch, "doubled") == [[2 * value for value in row] for row in ids(batch(4), "ids")]
    assert group(mesh=Mesh(dp=1, tp=2)).call.double_and_count(batch(3)).metrics == (3,), "one rank reports"


def test_a_function_goes_to_every_worker() -> None:
    def longest_first(data: DataProto) -> DataProto:
        return data[::-1]

    result = group(2).call.apply(longest_first, batch(4))
    assert result.non_tensor_batch["uid"].tolist() == ["e0-000001", "e0-000000", "e0-000003", "e0-000002"]
    with pytest.raises(TypeError, match="needs a function as its first argument, got DataProto"):
        group().call.apply(batch(1), batch(1))  # type: ignore[arg-type]


def test_rank_zero_runs_on_worker_zero_alone() -> None:
    workers = group(3)
    assert workers.call.only_first(5) == 5
    assert workers.call.first(6) == 6
    assert [worker.seen for worker in workers.workers] == [[5, 6], [], []]
    assert workers.execute_rank_zero_sync("only_first", 7) == 7
    assert workers.execute_rank_zero("only_first", 8).result() == 8
    assert [pending.result() for pending in workers.execute_all("start_where")] == [0, 1, 2]


def test_ranks_of_one_data_parallel_group_get_the_same_rows_and_one_reports() -> None:
    workers = group(mesh=Mesh(dp=2, tp=2))
    data = batch(5)
    result = workers.call.double(data)
    assert ids(result, "doubled") == [[2 * value for value in row] for row in ids(data, "ids")]
    seen = [worker.seen[0] for worker in workers.workers]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert len(seen[0]) == 3
    assert len(seen[2]) == 2
    assert as_list(workers.call.count(data)) == [3, 2]


def test_a_non_blocking_call_gives_a_batch_that_the_next_call_takes() -> None:
    data = batch(7)
    workers = group(3)
    future = workers.call.start_double(data)
    assert future.wait() is future
    assert len(future) == 7
    again = group(2).call.double(future)
    assert ids(again, "doubled") == [[2 * value for value in row] for row in ids(data, "ids")]
    assert ids(future.get(), "doubled") == ids(again, "doubled")
    started: object = workers.call.start_where()
    assert isinstance(started, ResultFuture)
    assert started.get() == [0, 1, 2]


def test_a_method_may_ask_for_the_future_itself() -> None:
    kinds = group(2).call.kind(DataProtoFuture.from_local(batch(2)))
    assert kinds.non_tensor_batch["kind"].tolist() == ["DataProtoFuture"] * 2


def test_true_types_are_checked_at_run_time_too() -> None:
    with pytest.raises(TypeError, match="returned DataProto, not a list"):
        as_list(group().call.double(batch(1)))


def test_workers_know_their_place_when_they_start() -> None:
    workers = inline_group(lambda: Doubler(factor=5), mesh=Mesh(dp=2, tp=2))
    assert [worker.rank_at_start for worker in workers.workers] == [0, 1, 2, 3]
    assert [(worker.dp_rank, worker.dp_size, worker.world_size) for worker in workers.workers] == [
        (0, 2, 4),
        (0, 2, 4),
        (1, 2, 4),
        (1, 2, 4),
    ]
    assert workers.workers[3].factor == 5


def test_a_worker_outside_a_group_is_alone_and_callable() -> None:
    worker = Doubler()
    assert (worker.rank, worker.world_size) == (0, 1)
    assert ids(worker.double(batch(2)), "doubled") == [[], [2]]


def test_an_override_keeps_the_mark() -> None:
    result = inline_group(Tripler, world_size=2).call.double(batch(3))
    assert ids(result, "doubled") == [[], [3], [6, 9]]


def test_unmarked_and_unknown_methods_name_the_marked_ones() -> None:
    with pytest.raises(AttributeError, match=r"unmarked is not marked with @register.*marked: apply, count"):
        group().call.unmarked()
    with pytest.raises(AttributeError, match=r"Doubler.absent does not exist"):
        _ = group().call.absent  # type: ignore[attr-defined]
    assert "double" in dir(group().call)
    direct: Any = group()
    assert len(direct.double(batch(2))) == 2


def test_batches_of_one_call_have_equal_rows() -> None:
    class Two(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def both(self, left: DataProto, right: DataProto) -> DataProto:
            return left

    workers = inline_group(Two, world_size=2)
    with pytest.raises(ValueError, match=r"cut alike, but they have \[2, 3\] rows"):
        workers.call.both(batch(3), right=batch(2))
    assert len(workers.call.both(batch(3), right=batch(3))) == 3


def test_what_a_mode_cannot_do_is_said() -> None:
    with pytest.raises(TypeError, match="cuts a DataProto over the workers, but the call has none"):
        group().call.double(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="worker 0 returned int, but this dispatch mode joins DataProtos"):
        group(2).call.returns_a_number(batch(2))
    with pytest.raises(
        TypeError, match="worker 0 returned DataProto, but this dispatch mode joins batches with"
    ):
        group(2).call.doubles_without_metrics(batch(2))
    with pytest.raises(ValueError, match="would drop all parts but the first"):
        register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)
    with pytest.raises(TypeError, match="wait.*is async, and a group waits for plain methods only"):

        @register()
        async def wait(self: Worker) -> None: ...


@pytest.fixture
def modes() -> Iterator[None]:
    before = dict(dispatch_module.MODES)
    yield
    dispatch_module.MODES.clear()
    dispatch_module.MODES.update(before)


def round_robin(group: Any, numbers: list[int]) -> Any:
    return ([numbers[rank :: group.world_size] for rank in range(group.world_size)],), {}


def total(group: Any, outputs: list[int]) -> int:
    return sum(outputs)


@pytest.mark.usefixtures("modes")
def test_a_user_mode_is_a_named_pair_of_functions() -> None:
    mode = register_dispatch_mode("round_robin", round_robin, total)
    assert register_dispatch_mode("round_robin", round_robin, total) == mode

    class Adder(Worker):
        @register(dispatch_mode="round_robin")
        def by_name(self, numbers: list[int]) -> int:
            return sum(numbers) * 10**self.rank

        @register(dispatch_mode={"dispatch_fn": round_robin, "collect_fn": total})
        def by_pair(self, numbers: list[int]) -> int:
            return sum(numbers) * 10**self.rank

        @register(dispatch_mode=mode, blocking=False)
        def later(self, numbers: list[int]) -> int:
            return sum(numbers) * 10**self.rank

    workers = inline_group(Adder, world_size=2)
    # Worker 0 has 1 + 3 + 5 = 9, worker 1 has (2 + 4) * 10 = 60.
    assert workers.call.by_name([1, 2, 3, 4, 5]) == 69 == workers.call.by_pair([1, 2, 3, 4, 5])
    started: object = workers.call.later([1, 2, 3, 4, 5])
    assert isinstance(started, ResultFuture)
    assert started.get() == 69


@pytest.mark.usefixtures("modes")
def test_bad_modes_are_refused_with_the_known_names() -> None:
    register_dispatch_mode("mine", round_robin, total)
    with pytest.raises(ValueError, match="'mine' is already registered"):
        register_dispatch_mode("mine", total, round_robin)
    with pytest.raises(ValueError, match="unknown dispatch mode 'DP_COMPUT'; known: ALL_TO_ALL, DP_COMPUTE"):
        register(dispatch_mode="DP_COMPUT")
    with pytest.raises(ValueError, match=r"keys dispatch_fn and collect_fn, got \['dispatch_fn'\]"):
        register(dispatch_mode={"dispatch_fn": round_robin})

    class Short(Worker):
        @register(dispatch_mode={"dispatch_fn": lambda group, x: (([x],), {}), "collect_fn": total})
        def run(self, x: int) -> int:
            return x

    with pytest.raises(ValueError, match="gave 1 entries for argument 0 of run, but the group has 2 workers"):
        inline_group(Short, world_size=2).call.run(1)


def test_a_worker_that_writes_into_a_tensor_is_found_out_as_in_another_process() -> None:
    class Adder(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def add_one(self, numbers: Tensor) -> Tensor:
            return numbers.add_(1)

    group = inline_group(Adder)
    with pytest.raises(RuntimeError, match=r"Adder.add_one wrote into a tensor it was given; clone it"):
        group.call.add_one(torch.zeros(2))
