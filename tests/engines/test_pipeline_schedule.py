"""Order of the passes of a pipeline: every pass once, nobody waits for ever, few micro-batches at a time."""

from __future__ import annotations

import pytest

from strop.engines.parallel.pipeline import stage_layers
from strop.engines.parallel.schedule import Message, PassKind, Schedule, padded, schedule


def run(plan: Schedule) -> list[int]:
    """Run it with unbounded links; the most micro-batches that each rank has open at a time."""
    ranks = range(len(plan.passes))
    arrived: set[Message] = set()
    places, open_passes, most = ([0 for _ in ranks] for _ in range(3))
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while places[rank] < len(plan.passes[rank]):
                stage_pass = plan.passes[rank][places[rank]]
                needed = plan.needed(rank, stage_pass)
                if needed is not None and needed not in arrived:
                    break
                if (given := plan.given(rank, stage_pass)) is not None:
                    arrived.add(given[1])
                open_passes[rank] += 1 if stage_pass.kind is PassKind.FORWARD else -1
                most[rank] = max(most[rank], open_passes[rank])
                places[rank] += 1
                moved = True
    assert places == [len(passes) for passes in plan.passes], "a rank waits for what nobody sends"
    return most


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
        most = run(plan)
        if trains and num_chunks == 1:  # as many as there are stages behind it, itself included
            assert most == [min(count, num_ranks - rank) for rank in range(num_ranks)]


def test_one_forward_one_backward_of_two_ranks() -> None:
    first, second = schedule(2, 1, 4, trains=True).passes
    written = [" ".join(f"{one.kind.value}{one.micro_batch}" for one in passes) for passes in (first, second)]
    assert written == ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


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
