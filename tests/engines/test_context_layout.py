"""Which tokens a context rank has, and what its queries see, beside a slow loop over the whole row."""

from __future__ import annotations

import pytest
import torch
from default_cases import draws
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention_plan import CALLS, any_plan, mix, num_tokens, plan
from test_varlen_attention import kernel_of_docs
from torch import Tensor

from references import packed_attention
from strop.engines import attention_buckets
from strop.engines.attention import PackedAttention
from strop.engines.attention_form import AttentionForm
from strop.engines.parallel.context import ContextLayout, context_layout
from strop.engines.segments import Segment
from strop.engines.varlen import varlen_plan

CPU = torch.device("cpu")


def scores(segments: tuple[Segment, ...]) -> float:
    """Pairs of a query and a key that it sees."""
    return sum(s.length * (s.num_keys - s.length) + s.length * (s.length + 1) / 2 for s in segments)


def tensors(segments: list[Segment], heads: tuple[int, int], value_dim: int) -> tuple[Tensor, ...]:
    """Query, key, value and weight of each output, [N, ., .], for the row."""
    generator = torch.Generator().manual_seed(num_tokens(segments))
    shapes = ((heads[0], 6), (heads[1], 6), (heads[1], value_dim), (heads[0], value_dim))
    return tuple(
        torch.randn(
            num_tokens(segments), *shape, dtype=torch.float64, generator=generator, requires_grad=True
        )
        for shape in shapes
    )


def placed(row: Tensor, layout: ContextLayout) -> Tensor:
    """The row of tokens in the order of the ranks, padding of ones included: as all ranks together have it."""
    padding = row.new_ones(layout.tokens.numel() - len(row), *row.shape[1:])
    return torch.cat([row, padding])[layout.tokens.flatten()]


@pytest.mark.draws
@settings(max_examples=draws(20, by_default=7), deadline=None)
@given(
    segments=any_plan(12),
    num_ranks=st.integers(1, 5),
    window=st.none() | st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (3, 3)]),
    small=st.sampled_from([0, 60, 1 << 15]),
    softcap=st.sampled_from([None, None, 0.5]),
    has_sinks=st.booleans(),
    value_dim=st.sampled_from([6, 4]),
)
def test_outputs_and_gradients_of_all_ranks_are_those_of_a_loop(
    segments: list[Segment],
    num_ranks: int,
    window: int | None,
    heads: tuple[int, int],
    small: int,
    softcap: float | None,
    has_sinks: bool,
    value_dim: int,
) -> None:
    query, key, value, weight = tensors(segments, heads, value_dim)
    sinks = torch.linspace(-1, 2, heads[0], dtype=torch.float64, requires_grad=True)
    options = {"scaling": 0.3, "window": window, "softcap": softcap, "sinks": sinks if has_sinks else None}
    layout = context_layout(segments, len(query), num_ranks)
    keys, values = placed(key, layout), placed(value, layout)
    queries = placed(query, layout).chunk(num_ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_buckets, "SMALL_BUCKET", small)
        out = torch.cat(
            [
                PackedAttention(layout.segments[rank], device=CPU, places=layout.places(rank)).attend(
                    0, queries[rank], keys, values, AttentionForm(**options)
                )
                for rank in range(num_ranks)
            ]
        )[layout.where[: len(query)]]
    leaves = (query, key, value, sinks)
    grads = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
    tuples = [(s.start, s.length, s.prefix) for s in segments]
    wanted = packed_attention.attend(query, key, value, tuples, **options)
    torch.testing.assert_close(out, wanted, atol=1e-12, rtol=1e-12)
    wanted_grads = torch.autograd.grad((wanted * weight).sum(), leaves, allow_unused=True)
    torch.testing.assert_close(grads, wanted_grads, atol=1e-11, rtol=1e-11)


def test_chunks_of_a_sequence_begin_where_the_sequence_does() -> None:
    """Runs of Llama 4, of 4 tokens: counted from the beginning of the prompt, not of the rank's run."""
    segments = plan([(5, [9, 2])])
    query, key, value, _ = tensors(segments, (2, 1), 6)
    layout = context_layout(segments, len(query), 2)
    form = AttentionForm(scaling=0.3, chunk=4)
    whole = PackedAttention(segments, device=CPU).attend(0, query, key, value, form)
    for rank in range(2):
        mine = PackedAttention(layout.segments[rank], device=CPU, places=layout.places(rank))
        out = mine.attend(
            0, placed(query, layout).chunk(2)[rank], placed(key, layout), placed(value, layout), form
        )
        torch.testing.assert_close(out, whole[layout.tokens[rank]])


@pytest.mark.draws
@settings(max_examples=draws(20, by_default=7), deadline=None)
@given(segments=any_plan(12), num_ranks=st.integers(1, 4), window=st.none() | st.integers(1, 9))
def test_one_call_for_unequal_lengths_has_the_same_plan(
    segments: list[Segment], num_ranks: int, window: int | None
) -> None:
    query, key, value, _ = tensors(segments, (4, 2), 6)
    layout = context_layout(segments, len(query), num_ranks)
    tuples = [(s.start, s.length, s.prefix) for s in segments]
    wanted = placed(
        packed_attention.attend(query, key, value, tuples, scaling=0.4, window=window), layout
    ).chunk(num_ranks)
    for rank, queries in enumerate(placed(query, layout).chunk(num_ranks)):
        found = varlen_plan(layout.segments[rank], CPU, layout.places(rank))
        assert found is not None
        form = AttentionForm(scaling=0.4, window=window)
        out = found.attend(queries, placed(key, layout), placed(value, layout), form, kernel_of_docs)
        own = layout.tokens[rank] < len(query)
        torch.testing.assert_close(out[own], wanted[rank][own], atol=1e-12, rtol=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    blocks=st.lists(
        st.tuples(st.integers(1, 90), st.lists(st.integers(0, 90), max_size=6)), min_size=1, max_size=5
    ),
    num_ranks=st.integers(1, 9),
)
def test_every_token_is_on_one_rank_and_every_rank_has_as_many(
    blocks: list[tuple[int, list[int]]], num_ranks: int
) -> None:
    segments = plan(blocks)
    total = num_tokens(segments)
    layout = context_layout(segments, total, num_ranks)
    n = -(-total // num_ranks)
    assert layout.tokens.shape == (num_ranks, n)
    assert sorted(layout.tokens.flatten().tolist()) == list(range(n * num_ranks))
    for mine, tokens in zip(layout.segments, layout.tokens.tolist(), strict=True):
        assert [t for s in mine for t in range(s.start, s.start + s.length)] == tokens


def test_a_long_sequence_is_cut_into_two_runs_of_equal_work_per_rank() -> None:
    # 16 tokens in 8 runs of 2: the first and the last run for rank 0, and so on.
    layout = context_layout(plan([(16, [])]), 16, 4)
    assert layout.tokens.tolist() == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert len(layout.segments[3]) == 1
    assert {scores(mine) for mine in context_layout(plan([(4096, [])]), 4096, 4).segments} == {
        4096 * 4097 / 2 / 4
    }


def test_short_sequences_stay_whole_but_where_a_share_ends() -> None:
    segments = plan([(10, [])] * 8)
    layout = context_layout(segments, 80, 2)
    assert [[s.length for s in mine] for mine in layout.segments] == [[10] * 4, [10] * 4]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_work_is_nearly_the_same_for_realistic_lengths(name: str, num_ranks: int) -> None:
    """Cost of a pass as `balance.sequence_workload` counts it, 24,576 of a token's keys to its layers' products."""
    segments = mix(name)
    layout = context_layout(segments, num_tokens(segments), num_ranks)
    pairs = [scores(mine) for mine in layout.segments]
    assert sum(pairs) == pytest.approx(scores(tuple(segments)), rel=1e-3)
    assert max(pairs) < 1.31 * sum(pairs) / num_ranks  # of the attention alone, in the wildest mixture
    work = [24_576 * layout.tokens.shape[1] + 2 * of_rank for of_rank in pairs]
    assert max(work) < 1.01 * sum(work) / num_ranks
