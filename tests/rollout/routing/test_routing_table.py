"""Decisions of the routing table, by hand."""

from __future__ import annotations

import pytest

from strop.rollout.routing.table import Decision, RoutedRequest, RoutingTable


def table_of(*capacities: int, patience_s: float = 2.0, can_continue: bool = True) -> RoutingTable:
    """Replicas of these capacities, all of which serve from second 0."""
    table = RoutingTable(patience_s=patience_s)
    for index, capacity in enumerate(capacities):
        table.add(index, capacity=capacity, can_continue=can_continue)
        table.begin(index, 0, 0.0)
    return table


def ask(
    table: RoutingTable, origin: int, *numbers: int, now: float = 0.0, **options: object
) -> list[int | None]:
    """Places of new requests, each of an episode of its own; -1 for one that waits."""
    places: list[int | None] = []
    for number in numbers:
        request = RoutedRequest(origin, number, f"{origin}/{number}", **options)  # type: ignore[arg-type]
        decisions = table.place(request, now)
        places.append(decisions[0].replica if decisions else -1)
    return places


def loads_of(table: RoutingTable) -> list[int]:
    """Requests of each replica."""
    return [replica.load for replica in table.replicas.values()]


def told(decisions: list[Decision]) -> list[tuple[int, int, int | None, bool]]:
    """Origin and number of the request, its replica, and whether it is moved."""
    return [(d.request.origin, d.request.number, d.replica, d.is_move) for d in decisions]


def test_requests_begin_where_they_are_asked_for() -> None:
    table = table_of(4, 4)
    assert ask(table, 0, 0, 1, 2) == [0, 0, 0]
    assert ask(table, 1, 0) == [1]


def test_a_full_home_has_its_requests_served_by_the_least_loaded_that_has_room() -> None:
    table = table_of(2, 3, 3)
    ask(table, 1, 0)
    assert ask(table, 0, 0, 1, 2, 3, 4) == [0, 0, 2, 1, 2]


def test_a_place_that_becomes_free_goes_first_to_requests_at_home_there() -> None:
    table = table_of(1, 1)
    assert ask(table, 0, 0, 1) == [0, 1]  # request 1 found room at replica 1
    assert ask(table, 0, 2) == [-1]
    assert ask(table, 1, 0) == [-1]
    assert told(table.leave(0, 1, 1.0)) == [(1, 0, 1, False)]
    assert told(table.leave(1, 0, 2.0)) == [(0, 2, 1, False)]


def test_later_requests_of_an_episode_go_where_the_last_one_was() -> None:
    table = table_of(1, 2)
    ask(table, 0, 0)
    first = RoutedRequest(0, 1, "e")
    assert told(table.place(first, 0.0)) == [(0, 1, 1, False)]
    table.leave(0, 1, 1.0)
    table.leave(0, 0, 1.0)
    assert told(table.place(RoutedRequest(0, 2, "e"), 1.0)) == [(0, 2, 1, False)]


def test_half_of_the_difference_is_taken_over_after_a_time_of_imbalance_the_last_ones_first() -> None:
    # Loads 7 and 1: 7 >= 2 * 1 + 2, so (7 - 1) // 2 = 3 requests move, once it has lasted 2 seconds.
    table = table_of(8, 8)
    ask(table, 0, *range(7))
    ask(table, 1, 0)
    assert table.rebalance(1.0) == []
    assert table.rebalance(2.9) == []
    assert told(table.rebalance(3.0)) == [(0, 6, 1, True), (0, 5, 1, True), (0, 4, 1, True)]
    assert loads_of(table) == [4, 4]
    assert table.rebalance(9.0) == []


def test_an_imbalance_that_ends_begins_anew() -> None:
    table = table_of(8, 8)
    ask(table, 0, 0, 1, 2, 3)
    table.rebalance(0.0)
    ask(table, 1, 0, 1, now=1.0)
    assert table.rebalance(1.5) == []
    table.leave(1, 0, 1.6)
    table.leave(1, 1, 1.6)
    assert table.rebalance(3.0) == []
    assert told(table.rebalance(5.0)) == [(0, 3, 1, True), (0, 2, 1, True)]


def table_of_copies() -> RoutingTable:
    """Two copies of a model, each over two ranks that generate together."""
    table = RoutingTable(patience_s=2.0)
    for index in range(4):
        table.add(index, capacity=8, can_continue=True, copy=index // 2 * 2)
        table.begin(index, 0, 0.0)
    return table


def test_requests_stay_among_ranks_that_compute_together() -> None:
    table = table_of_copies()
    ask(table, 0, *range(6))
    ask(table, 2, *range(3))
    ask(table, 3, *range(3))
    table.rebalance(0.0)
    assert table.rebalance(9.0) == [], "three for each rank of either copy"


def test_a_copy_without_work_takes_over_from_the_ranks_of_another() -> None:
    # 8 requests and none: half of them go on in the other copy, by turns of its ranks.
    table = table_of_copies()
    ask(table, 0, *range(8))
    table.rebalance(0.0)
    assert told(table.rebalance(2.0)) == [(0, 7, 2, True), (0, 6, 3, True), (0, 5, 2, True), (0, 4, 3, True)]
    assert loads_of(table) == [4, 0, 2, 2]
    assert table.rebalance(9.0) == []


def test_both_ranks_of_a_busy_copy_give_the_ones_that_run_most_first() -> None:
    # 5 + 3 requests and none: 4 go, of rank 0 until it runs as many as rank 1.
    table = table_of_copies()
    ask(table, 0, *range(5))
    ask(table, 1, *range(3))
    table.rebalance(0.0)
    moved = [(0, 4, 2, True), (0, 3, 3, True), (0, 2, 2, True), (1, 2, 3, True)]
    assert told(table.rebalance(2.0)) == moved
    assert loads_of(table) == [2, 2, 2, 2]


def test_a_rank_whose_requests_stay_leaves_it_to_the_other_one_to_give() -> None:
    table = table_of_copies()
    ask(table, 0, *range(5), stays=True)
    ask(table, 1, *range(3))
    table.rebalance(0.0)
    assert told(table.rebalance(2.0)) == [(1, 2, 2, True), (1, 1, 3, True), (1, 0, 2, True)]


def test_a_request_goes_to_the_rank_that_has_not_lost_it() -> None:
    table = table_of_copies()
    ask(table, 0, *range(4), excluded=frozenset({2}))
    table.rebalance(0.0)
    assert told(table.rebalance(2.0)) == [(0, 3, 3, True), (0, 2, 3, True)]


def test_a_rank_without_room_leaves_it_to_the_other_one_to_take() -> None:
    table = RoutingTable(patience_s=2.0)
    for index, capacity in enumerate((8, 8, 1, 8)):
        table.add(index, capacity=capacity, can_continue=True, copy=index // 2 * 2)
        table.begin(index, 0, 0.0)
    ask(table, 0, *range(8))
    table.rebalance(0.0)
    assert told(table.rebalance(2.0)) == [(0, 7, 2, True), (0, 6, 3, True), (0, 5, 3, True), (0, 4, 3, True)]


def test_copies_of_several_sizes_have_as_many_for_each_rank() -> None:
    # 9 requests on two ranks and none on one: (9 * 1 - 0 * 2) // 3 = 3 of them go, which leaves 3 for each rank.
    table = RoutingTable(patience_s=2.0)
    for index, copy in enumerate((0, 0, 2)):
        table.add(index, capacity=9, can_continue=True, copy=copy)
        table.begin(index, 0, 0.0)
    ask(table, 0, *range(9))
    table.rebalance(0.0)
    assert [number for _, number, _, _ in told(table.rebalance(2.0))] == [8, 7, 6]


def test_a_copy_of_which_a_rank_does_not_serve_takes_nothing() -> None:
    table = table_of_copies()
    table.stop(3, "its part of the step failed", 0.0)
    ask(table, 0, *range(8))
    table.rebalance(0.0)
    assert table.rebalance(9.0) == []


def test_a_rank_is_busy_while_one_that_computes_with_it_has_a_request() -> None:
    table = table_of_copies()
    ask(table, 0, 0, now=1.0)
    table.leave(0, 0, 3.0)
    assert table.take_stats(4.0).idle_share == 1 - (2 * 2) / (4 * 4)


def test_loads_within_a_factor_of_two_stay() -> None:
    # 3 < 2 * 1 + 2.
    table = table_of(8, 8, patience_s=0.0)
    ask(table, 0, 0, 1, 2)
    ask(table, 1, 0)
    table.rebalance(0.0)
    assert table.rebalance(9.0) == []


@pytest.mark.parametrize("why", ["cannot continue", "older weights", "images"])
def test_requests_that_cannot_go_on_elsewhere_stay(why: str) -> None:
    table = table_of(8, 8, patience_s=0.0, can_continue=why != "cannot continue")
    ask(table, 0, 0, 1, 2, 3, stays=why == "images")
    if why == "older weights":
        table.begin(0, 1, 0.0)
    table.rebalance(0.0)
    assert table.rebalance(9.0) == []


def test_a_request_never_begins_with_older_weights_than_those_of_its_worker() -> None:
    table = table_of(1, 4)
    table.begin(0, 3, 0.0)
    assert ask(table, 0, 0, 1) == [0, -1]
    assert told(table.begin(1, 3, 1.0)) == [(0, 1, 1, False)]


def test_a_replica_that_is_gone_takes_its_own_requests_with_it_and_others_ask_again() -> None:
    table = table_of(2, 2, 2)
    ask(table, 0, 0, 1)
    assert ask(table, 1, 0, 1, 2) == [1, 1, 2]
    assert ask(table, 2, 0) == [2]
    assert ask(table, 1, 3) == [-1]
    assert told(table.remove(0, 1.0)) == []
    assert told(table.remove(1, 1.0)) == []  # 1/2 at replica 2 has ended with it
    assert loads_of(table) == [1]
    # The client of a request that was lost gives its place back and asks for another one.
    table.leave(2, 0, 2.0)
    assert told(table.place(RoutedRequest(2, 1, "2/0", excluded=frozenset({1})), 2.0)) == [(2, 1, 2, False)]


def test_a_replica_that_came_back_knows_nothing_of_the_requests_before() -> None:
    table = table_of(1, 1)
    assert ask(table, 0, 0, 1) == [0, 1]
    table.remove(1, 1.0)
    table.add(1, capacity=1, can_continue=True)
    table.begin(1, 0, 1.0)
    assert table.leave(0, 1, 2.0) == []
    assert ask(table, 1, 0) == [1]


def test_without_a_replica_a_request_is_told_so() -> None:
    table = table_of(1, 1)
    assert ask(table, 0, 0, 1) == [0, 1]
    assert ask(table, 0, 2) == [-1]
    table.stop(0, "its engine died", 1.0)
    assert told(table.stop(1, "its engine died too", 1.0)) == [(0, 2, None, False)]
    assert table.causes() == "rollout worker 0: its engine died; rollout worker 1: its engine died too"
    assert ask(table, 0, 3) == [None]


def test_waiting_requests_of_a_home_that_stops_go_elsewhere() -> None:
    table = table_of(1, 1)
    ask(table, 0, 0)
    ask(table, 1, 0)
    assert ask(table, 0, 1) == [-1]
    assert table.stop(0, "it died", 1.0) == []
    assert told(table.leave(1, 0, 2.0)) == [(0, 1, 1, False)]


def test_idle_share_counts_replicas_while_they_serve() -> None:
    # Replica 0 has a request from 0 to 4, replica 1 from 0 to 1: 5 of 8 seconds.
    table = table_of(2, 2)
    ask(table, 0, 0)
    ask(table, 1, 0)
    table.leave(1, 0, 1.0)
    table.leave(0, 0, 4.0)
    for index in (0, 1):
        table.stop(index, "the step has ended", 4.0)
    stats = table.take_stats(9.0)
    assert (stats.serving_s, stats.busy_s, stats.idle_share) == (8.0, 5.0, 3 / 8)
    assert stats.num_taken_over == 0
    assert table.take_stats(10.0).serving_s == 0
