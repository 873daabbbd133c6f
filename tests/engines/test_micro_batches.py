"""Rows into micro-batches: every row once, never more tokens than the budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from references.token_passes import TEXT_MODEL
from strop.engines.micro_batch import pack
from strop.engines.packing import make_rows, micro_batches, token_rows
from strop.engines.parallel.ranks import Parallel
from strop.protocol import DataProto


def cut(rows: DataProto, max_tokens: int, *, sp_size: int = 1) -> list[list[int]]:
    parallel = Parallel(device=torch.device("cpu"), sp_size=sp_size)
    return micro_batches(rows, max_tokens=max_tokens, parallel=parallel)


def prompt_lengths(rows: DataProto) -> list[int]:
    return [len(row.prompt) for row in token_rows(rows)]


def rows_of(shapes: list[tuple[int, int]]) -> DataProto:
    """Rows of (prompt number, response length); prompt i has i + 1 tokens."""
    prompts = [torch.full((which + 1,), which) for which, _ in shapes]
    responses = [torch.arange(length) + 10 * index for index, (_, length) in enumerate(shapes)]
    return make_rows(prompts, responses)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 20)), max_size=40),
    extra=st.integers(0, 60),
)
def test_budget_is_never_exceeded_and_no_row_is_lost(shapes: list[tuple[int, int]], extra: int) -> None:
    rows = rows_of(shapes)
    max_tokens = max((len(row) for row in token_rows(rows)), default=1) + extra
    parts = cut(rows, max_tokens)
    assert sorted(row for part in parts for row in part) == list(range(len(shapes)))
    for part in parts:
        micro_batch = pack(rows, TEXT_MODEL, rows=part)
        assert micro_batch.num_tokens <= max_tokens
        assert micro_batch.position_ids.shape == micro_batch.input_ids.shape == (1, micro_batch.num_tokens)


def test_rows_of_one_prompt_stay_together_when_they_fit() -> None:
    rows = rows_of([(4, 3), (2, 3), (4, 3), (2, 3)])  # prompts of 5 and 3 tokens; 5 + 2 + 2 and 3 + 2 + 2
    parts = cut(rows, 9)
    assert [{prompt_lengths(rows)[row] for row in part} for part in parts] == [{5}, {3}]


def test_a_group_above_the_budget_is_cut() -> None:
    rows = rows_of([(4, 3)] * 5)  # 5 + 5 * 2 = 15 tokens
    parts = cut(rows, 9)
    assert [len(part) for part in parts] == [2, 2, 1]


def test_small_groups_fill_the_room_that_larger_ones_leave() -> None:
    rows = rows_of([(7, 3), (1, 1), (5, 3), (1, 2)])  # 10, then a pair of 2 + 0 + 1, and 8 tokens
    assert [sum(prompt_lengths(rows)[row] for row in part) for part in cut(rows, 12)] == [8, 10]
    assert len(cut(rows, 21)) == 1


def test_devices_that_share_a_sequence_share_the_budget() -> None:
    rows = rows_of([(4, 3)] * 5)
    assert cut(rows, 3, sp_size=3) == cut(rows, 9)
    with pytest.raises(
        ValueError,
        match=r"13 tokens \(5 of prompt\), but engine.max_tokens_per_device of this role is 6 on each of the 2 that "
        r"share it: "
        r"raise it to at least 7, or lower data.max_prompt_tokens or data.max_response_tokens .* by 1",
    ):
        cut(rows_of([(4, 9)]), 6, sp_size=2)


def test_a_sample_that_fits_nowhere_is_named_with_what_to_do() -> None:
    rows = rows_of([(1, 1), (4, 9)])  # 5 + 8 = 13 tokens: the last one is no input
    assert len(cut(rows, 13)) == 2
    with pytest.raises(
        ValueError,
        match=r"a sample has 13 tokens \(5 of prompt\), but engine.max_tokens_per_device of this role is 12: raise "
        r"it to at "
        r"least 13, or lower data.max_prompt_tokens or data.max_response_tokens .* by 1",
    ):
        cut(rows, 12)


def test_pack_by_hand() -> None:
    # Rows a and c share the prompt 1 2; b is alone. Responses: a = 10 11 12, b = 20, c = 30 31.
    prompts = [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([1, 2])]
    responses = [torch.tensor([10, 11, 12]), torch.tensor([20]), torch.tensor([30, 31])]
    micro_batch = pack(make_rows(prompts, responses), TEXT_MODEL)
    assert micro_batch.input_ids.tolist() == [[1, 2, 10, 11, 30, 3]]
    assert micro_batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 0]]
    assert micro_batch.hidden_index.tolist() == [1, 1, 2, 3, 4, 5]
    assert micro_batch.targets.tolist() == [10, 30, 11, 12, 31, 20]
    assert micro_batch.prediction_index.tolist() == [0, 2, 3, 5, 1, 4]
    assert micro_batch.response_index.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("prompt", "response"), [(0, 3), (3, 0)])
def test_a_row_without_prompt_or_response_is_refused(prompt: int, response: int) -> None:
    rows = make_rows([torch.ones(1), torch.ones(prompt)], [torch.ones(1), torch.ones(response)])
    with pytest.raises(ValueError, match=f"row 1 has {prompt} prompt and {response} response tokens"):
        cut(rows, 10)
