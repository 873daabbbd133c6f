"""The tree of rows: each beginning that rows share once, whatever the rows; pieces of it below any budget."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from default_cases import draws
from hypothesis import given, settings
from hypothesis import strategies as st

from references.token_passes import TEXT_MODEL
from strop.engines.micro_batch import pack
from strop.engines.packing import make_rows, micro_batches, token_rows
from strop.engines.parallel.ranks import alone
from strop.engines.prefix_tree import MIN_SHARED, PrefixTree, Row, prefix_tree
from strop.protocol import DataProto, columns
from strop.protocol.trajectory import Media


def rows_of(sequences: Sequence[Sequence[int]]) -> DataProto:
    """Rows that a model reads these tokens of; the last token of each response is a further one."""
    return make_rows([torch.tensor(s[:1]) for s in sequences], [torch.tensor([*s[1:], 7]) for s in sequences])


def tree_of(sequences: Sequence[Sequence[int]]) -> PrefixTree:
    return prefix_tree(token_rows(rows_of(sequences)))


def runs(tree: PrefixTree, sequences: Sequence[Sequence[int]]) -> list[tuple[list[int], int | None]]:
    """Tokens of each node, and the node before."""
    return [(list(sequences[node.row][node.start : node.end]), node.parent) for node in tree.nodes]


def path(tree: PrefixTree, node: int | None) -> list[int]:
    """A node behind those that it continues."""
    return [] if node is None else [*path(tree, tree.nodes[node].parent), node]


# Few token ids, so that rows begin alike, end within others and are equal.
sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=14)


def test_a_tree_by_hand() -> None:
    rows = [[1, 2, 3, 4, 5], [6, 6], [1, 2, 7, 8], [1, 2, 7, 8, 9], [1, 2]]
    tree = tree_of(rows)
    assert runs(tree, rows) == [([1, 2], None), ([3, 4, 5], 0), ([7, 8, 9], 0), ([6, 6], None)]
    assert tree.last == (1, 3, 2, 2, 0)
    assert tree.num_tokens == 10


def test_the_turns_of_an_episode_are_one_run() -> None:
    rows = [[5, 6], [5, 6, 7, 8], [5, 6, 7, 8, 9]]
    assert runs(tree_of(rows), rows) == [([5, 6, 7, 8, 9], None)]


@settings(max_examples=100, deadline=None)
@given(sequences)
def test_every_beginning_is_there_once(rows: list[list[int]]) -> None:
    tree = tree_of(rows)
    beginnings = {tuple(row[:length]) for row in rows for length in range(1, len(row) + 1)}
    assert tree.num_tokens == len(beginnings)
    assert all(len(node) > 0 for node in tree.nodes)
    for number, row in enumerate(rows):
        tokens = [t for node in path(tree, tree.last[number]) for t in runs(tree, rows)[node][0]]
        assert tokens[: len(row)] == row
        assert tree.nodes[tree.last[number]].start < len(row)
    for number, node in enumerate(tree.nodes):
        before = None if number == 0 else path(tree, number - 1)
        assert node.parent is None or node.parent in (before or []), "what continues a node follows it"


@settings(max_examples=60, deadline=None)
@given(rows=sequences, extra=st.integers(0, 12), data=st.data())
def test_no_piece_is_above_the_budget_and_none_could_be_joined(
    rows: list[list[int]], extra: int, data: st.DataObject
) -> None:
    batch, budget = rows_of(rows), max(map(len, rows)) + extra
    order = data.draw(st.permutations(range(len(rows))), label="order")
    parts = micro_batches(batch, max_tokens=budget, parallel=alone("cpu"), rows=order)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    sizes = [pack(batch, TEXT_MODEL, rows=part).num_tokens for part in parts]
    assert max(sizes) <= budget
    if tree_of(rows).num_tokens <= budget:
        assert len(parts) == 1
    for one, other in itertools.pairwise(sizes):
        assert one + other > budget, "they fit together"
    assert parts == micro_batches(batch, max_tokens=budget, parallel=alone("cpu"), rows=order)


def test_a_tree_above_the_budget_is_cut_where_it_forks() -> None:
    # Behind 4 tokens two branches, of 3 tokens and two leaves of 4 each: 4 + 2 * (3 + 2 * 4) = 26 tokens, and 15 each.
    rows = [[1, 1, 1, 1, *[branch] * 3, *[leaf] * 4] for leaf in (7, 8) for branch in (5, 6)]
    parts = micro_batches(rows_of(rows), max_tokens=16, parallel=alone("cpu"))
    assert parts == [[0, 2], [1, 3]]


def test_what_stands_for_other_images_or_goes_to_other_experts_is_not_shared() -> None:
    def image(key: str) -> Media:
        return Media(kind="image", parts=(), size=(2, 2), grid=(1, 1, 3), start=2, num_tokens=3, key=key)

    one = Row(prompt=torch.tensor([1, 2, 9, 9, 9, 3]), response=torch.tensor([4, 5]), media=(image("a"),))
    other = dataclasses.replace(one, media=(image("b"),))
    assert [len(node) for node in prefix_tree([one, one, other]).nodes] == [7, 7]
    experts = torch.zeros(7, 4, dtype=torch.int16)
    changed = experts.clone()
    changed[4, 3] = 1
    routed = [dataclasses.replace(one, experts=chosen) for chosen in (experts, changed, experts)]
    assert [len(node) for node in prefix_tree(routed[:2]).nodes] == [7, 7]
    assert prefix_tree(routed[::2]).num_tokens == 7


def test_rows_with_the_same_experts_share_whatever_lies_between_them() -> None:
    rows = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    experts = [torch.full((3, 2), number, dtype=torch.int16) for number in (0, 1, 0)]
    batch = rows_of(rows).union(DataProto.from_dict({"routed_experts": columns.jagged(experts)}))
    tree = prefix_tree(token_rows(batch, replays=True))
    assert runs(tree, rows) == [([1, 2], None), ([3], 0), ([5], 0), ([1, 2, 4], None)]
    assert tree.last == (1, 3, 2)


@pytest.mark.parametrize("kind", ["image", "video"])
@pytest.mark.parametrize("place", [2, 3, 4])
def test_experts_that_differ_within_a_medium_leave_it_whole(kind: Any, place: int) -> None:
    medium = Media(kind=kind, parts=(), size=(2, 2), grid=(1, 1, 3), start=2, num_tokens=3, key="a")
    row = Row(prompt=torch.tensor([1, 2, 9, 9, 9, 3]), response=torch.tensor([4, 5]), media=(medium,))
    experts = torch.zeros(7, 4, dtype=torch.int16)
    changed = experts.clone()
    changed[place, 3] = 1
    rows = [dataclasses.replace(row, experts=chosen) for chosen in (experts, changed)]
    # Joined by 2 tokens, fewer than their prompts have, they are not joined at all; behind as many more, by those.
    assert [(node.start, node.end) for node in prefix_tree(rows).nodes] == [(0, 7), (0, 7)]
    longer = [
        dataclasses.replace(
            row,
            prompt=torch.cat([torch.full((MIN_SHARED,), 8), row.prompt]),
            media=(dataclasses.replace(medium, start=2 + MIN_SHARED),),
            experts=torch.cat([torch.zeros(MIN_SHARED, 4, dtype=torch.int16), row.experts]),
        )
        for row in rows
        if row.experts is not None
    ]
    at = MIN_SHARED + 2
    assert [(node.start, node.end) for node in prefix_tree(longer).nodes] == [
        (0, at),
        (at, at + 5),
        (at, at + 5),
    ]


def test_the_first_few_tokens_of_different_prompts_are_not_shared() -> None:
    """As of a chat template; the prompt of a group is shared however short it is."""
    header = [1, 2, 3]
    one, other = torch.tensor([*header, 5, 6]), torch.tensor([*header, 7])
    responses = [torch.tensor([8, 9]), torch.tensor([9, 8]), torch.tensor([8, 8])]
    rows = [Row(prompt=prompt, response=response) for prompt in (one, other) for response in responses]
    nodes = prefix_tree(rows).nodes
    assert [(node.start, node.end, node.parent) for node in nodes] == [
        (0, 5, None), (5, 6, 0), (5, 6, 0), (0, 4, None), (4, 5, 3), (4, 5, 3)
    ]  # fmt: skip
    assert [len(node) for node in prefix_tree(rows[2:4]).nodes] == [6, 5]


@pytest.mark.parametrize("num_common", [MIN_SHARED - 1, MIN_SHARED])
def test_the_length_from_which_different_prompts_share(num_common: int) -> None:
    rows = [
        Row(prompt=torch.tensor([*[1] * num_common, last]), response=torch.tensor([4, 5])) for last in (2, 3)
    ]
    shares = num_common >= MIN_SHARED
    assert [len(node) for node in prefix_tree(rows).nodes] == (
        [num_common, 2, 2] if shares else [num_common + 2] * 2
    )


@pytest.mark.draws
@settings(max_examples=draws(300, by_default=100), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 24),
            st.lists(st.integers(0, 1), min_size=2, max_size=4),
            st.integers(1, 20),
            st.integers(0, 1),
        ),
        min_size=1,
        max_size=12,
    ),
    st.data(),
)
def test_some_rows_of_a_tree_never_take_more_tokens_than_there(
    shapes: list[tuple[int, list[int], int, int]], data: st.DataObject
) -> None:
    """Prompts of any length around that from which they share, with few branches: budgets hold for every piece."""
    rows = []
    for num_prompt, forks, num_response, expert in shapes:
        ids = torch.zeros(num_prompt + num_response, dtype=torch.int64)
        for place, token in zip((3, 7, 9, 18), forks, strict=False):
            ids[place : place + 1] = token
        experts = torch.full((len(ids) - 1, 2), expert, dtype=torch.int16)
        rows.append(Row(prompt=ids[:num_prompt], response=ids[num_prompt:], experts=experts))
    tree = prefix_tree(rows)
    some = data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1), label="some")
    needed = {node for row in some for node in path(tree, tree.last[row])}
    assert prefix_tree([rows[row] for row in sorted(some)]).num_tokens <= sum(
        len(tree.nodes[node]) for node in needed
    )


def test_budgets_hold_for_rows_with_experts() -> None:
    rows = [[1, 2, 3, leaf] for leaf in range(6)]
    experts = [torch.full((4, 2), number % 2, dtype=torch.int16) for number in range(6)]
    batch = rows_of(rows).union(DataProto.from_dict({"routed_experts": columns.jagged(experts)}))
    assert micro_batches(batch, max_tokens=6, parallel=alone("cpu"), replays=True) == [[0, 2, 4], [1, 3, 5]]


def test_experts_count_where_they_are_replayed_alone() -> None:
    rows = [[1, 2, 3], [1, 2, 3]]
    experts = [torch.full((3, 2), number, dtype=torch.int16) for number in range(2)]
    batch = rows_of(rows).union(DataProto.from_dict({"routed_experts": columns.jagged(experts)}))
    assert [
        len(micro_batches(batch, max_tokens=3, parallel=alone("cpu"), replays=r)) for r in (False, True)
    ] == [1, 2]


def test_predictions_are_made_once_for_rows_that_share_all_before_them() -> None:
    # After 1 2 come 3 (in two rows) and 4; the rows with 3 go on with 5, and end with 6 and 6.
    prompts, responses = [[1, 2]] * 3, [[3, 5, 6], [4, 6], [3, 5, 6]]
    packed = pack(
        make_rows([torch.tensor(p) for p in prompts], [torch.tensor(r) for r in responses]), TEXT_MODEL
    )
    assert packed.input_ids.tolist() == [[1, 2, 3, 5, 4]]
    assert packed.hidden_index.tolist() == [1, 1, 2, 3, 4]
    assert packed.targets.tolist() == [3, 4, 5, 6, 6]
    assert packed.prediction_index.tolist() == [0, 2, 3, 1, 4, 0, 2, 3]


@pytest.mark.parametrize("count", [0, 1])
def test_few_rows(count: int) -> None:
    assert tree_of([[3, 4]] * count).num_tokens == 2 * count
