"""Order of the passes of a pipeline: every pass once, nobody waits for ever, few micro-batches at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from strop.engines.parallel.schedule import Message, PassKind, Schedule, padded, schedule
from strop.engines.parallel.stages import stage_layers


@dataclass(frozen=True)
class Run:
    """A schedule that was run on links without a limit or delay."""

    most: list[int]
    """Micro-batches of each rank that are in memory together: from their forward pass to their last one."""
    seconds: float


def run(plan: Schedule, times: dict[PassKind, float] | None = None) -> Run:
    """Run it with these times of a pass of each kind."""
    ranks = range(len(plan.passes))
    last = [passes[-1].kind for passes in plan.passes]
    arrived: dict[Message, float] = {}
    places, in_memory, most = ([0 for _ in ranks] for _ in range(3))
    clocks = [0.0 for _ in ranks]
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while places[rank] < len(plan.passes[rank]):
                stage_pass = plan.passes[rank][places[rank]]
                needed = plan.needed(rank, stage_pass)
                if needed is not None and needed not in arrived:
                    break
                begin = clocks[rank] if needed is None else max(clocks[rank], arrived[needed])
                clocks[rank] = begin + (times or {}).get(stage_pass.kind, 1.0)
                if (given := plan.given(rank, stage_pass)) is not None:
                    arrived[given[1]] = clocks[rank]
                in_memory[rank] += (stage_pass.kind is PassKind.FORWARD) - (stage_pass.kind is last[rank])
                most[rank] = max(most[rank], in_memory[rank])
                places[rank] += 1
                moved = True
    assert places == [len(passes) for passes in plan.passes], "a rank waits for what nobody sends"
    return Run(most, max(clocks))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("wanted", [1, 2, 5, 8, 12])
def test_every_pass_is_run_once_and_what_it_needs_arrives(
    num_ranks: int, num_chunks: int, wanted: int
) -> None:
    count = padded(wanted, num_ranks, num_chunks)
    assert wanted <= count < wanted + num_ranks
    for trains in (True, False):
        plan = schedule(num_ranks, num_chunks, count, trains=trains)
        for passes in plan.passes:
            assert len(set(passes)) == len(passes) == num_chunks * count * (2 if trains else 1)
        most = run(plan).most
        if trains and num_chunks == 1:  # as many as there are stages behind it, itself included
            assert most == [min(count, num_ranks - rank) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 12])
def test_zero_bubble_runs_every_pass_once_and_keeps_no_more_than_one_forward_one_backward(
    num_ranks: int, count: int
) -> None:
    plan = schedule(num_ranks, 1, count, trains=True, zero_bubble=True)
    for rank, passes in enumerate(plan.passes):
        places = {(one.kind, one.micro_batch): place for place, one in enumerate(passes)}
        assert len(places) == len(passes) == 3 * count
        of_weights = [one for one in passes if one.kind is PassKind.WEIGHTS]
        assert {plan.needed(rank, one) or plan.given(rank, one) for one in of_weights} == {None}
        for number in range(count):
            order = [places[kind, number] for kind in (PassKind.FORWARD, PassKind.BACKWARD, PassKind.WEIGHTS)]
            assert order == sorted(order)
        plain = schedule(num_ranks, 1, count, trains=True).passes[rank]
        assert [one for one in passes if one.kind is not PassKind.WEIGHTS] == plain
        assert [number for kind, number in places if kind is PassKind.WEIGHTS] == list(range(count))
    assert run(plan).most == [min(count, num_ranks)] * num_ranks
    assert max(run(schedule(num_ranks, 1, count, trains=True)).most) == min(count, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (10.0, 11.0, 9.0), (1.0, 2.0, 1.0)])
def test_ranks_wait_as_long_as_the_paper_says(num_ranks: int, times: tuple[float, float, float]) -> None:
    # Qi et al. 2023, table 2.
    forward, backward, weights = times
    for count in (num_ranks, num_ranks + 1, 3 * num_ranks):
        work = count * sum(times)
        plain = {PassKind.FORWARD: forward, PassKind.BACKWARD: backward + weights}
        assert run(schedule(num_ranks, 1, count, trains=True), plain).seconds - work == pytest.approx(
            (num_ranks - 1) * (forward + backward + weights)
        )
        split = dict(zip(PassKind, times, strict=True))
        plan = schedule(num_ranks, 1, count, trains=True, zero_bubble=True)
        assert run(plan, split).seconds - work == pytest.approx(
            (num_ranks - 1) * (forward + backward - weights)
        )


@pytest.mark.parametrize(
    ("zero_bubble", "first", "second"),
    [
        (False, "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"),
        (True, "F0 F1 B0 W0 F2 B1 W1 F3 B2 W2 B3 W3", "F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3"),
    ],
)
def test_passes_of_two_ranks(zero_bubble: bool, first: str, second: str) -> None:
    plan = schedule(2, 1, 4, trains=True, zero_bubble=zero_bubble)
    written = [" ".join(f"{one.kind.value}{one.micro_batch}" for one in passes) for passes in plan.passes]
    assert written == [first, second]


def test_passes_without_gradient_have_one_order() -> None:
    assert schedule(3, 1, 4, trains=False, zero_bubble=True) == schedule(3, 1, 4, trains=False)


def test_messages_arrive_in_the_order_of_their_sender() -> None:
    plan = schedule(2, 2, 2, trains=True)  # stages 0 and 2 on rank 0, 1 and 3 on rank 1
    forward = [(message.stage, message.micro_batch) for message in plan.messages(0, 1, is_forward=True)]
    assert forward == [(1, 0), (1, 1), (3, 0), (3, 1)]
    backward = [(message.stage, message.micro_batch) for message in plan.messages(1, 0, is_forward=False)]
    assert backward == [(2, 0), (2, 1), (0, 0), (0, 1)]


def test_interleaved_stages_need_whole_rounds() -> None:
    with pytest.raises(
        ValueError, match="3 micro-batches do not divide into rounds of 2 ranks; add empty ones"
    ):
        schedule(2, 2, 3, trains=True)


def test_layers_of_stages() -> None:
    assert [len(layers) for layers in stage_layers(8, 4)] == [2, 2, 2, 2]
    assert [len(layers) for layers in stage_layers(9, 4)] == [2, 3, 2, 2]
    assert [len(layers) for layers in stage_layers(11, 4)] == [3, 3, 3, 2]  # the last one has the head
    assert stage_layers(5, 2, (3, 2)) == [range(3), range(3, 5)]
