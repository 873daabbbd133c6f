"""Attention over packed segments: the values of a slow loop, in few calls with little padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from references import packed_attention
from strop.engines import attention, attention_buckets
from strop.engines.attention import ATTENTION_NAME, PackedAttention
from strop.engines.attention_buckets import BUCKET_PADDING, SMALL_BUCKET
from strop.engines.attention_form import AttentionForm
from strop.engines.segments import Segment

CPU = torch.device("cpu")


def plan(blocks: list[tuple[int, list[int]]]) -> list[Segment]:
    """Segments of blocks (prompt length, suffix lengths); a block without suffixes is a lone sequence."""
    segments, at = [], 0
    for prompt, suffixes in blocks:
        start = at
        segments.append(Segment(start=at, length=prompt))
        at += prompt
        for length in suffixes:
            segments.append(Segment(start=at, length=length, prefix=((start, start + prompt),)))
            at += length
    return segments


def num_tokens(segments: list[Segment]) -> int:
    return sum(s.length for s in segments)


def shapes_of(segments: list[Segment]) -> list[tuple[int, int, int]]:
    """(segments, queries, keys) of each attention call."""
    return [bucket.shape for bucket in PackedAttention(segments, device=CPU).buckets]


def padded_and_used(segments: list[Segment]) -> tuple[int, int]:
    """Entries of all score matrices, with padding and without."""
    padded = sum(b * q * k for b, q, k in shapes_of(segments))
    return padded, sum(s.length * s.num_keys for s in segments)


def tree_plan(runs: list[tuple[int, int]]) -> list[Segment]:
    """Segments of runs (length, number of the run that it continues); one whose number is of no earlier run begins a
    sequence."""
    segments: list[Segment] = []
    at = 0
    for length, number in runs:
        prefix: tuple[tuple[int, int], ...] = ()
        if number < len(segments):
            before = segments[number]
            prefix = (*before.prefix, (before.start, before.start + before.length))
        segments.append(Segment(start=at, length=length, prefix=prefix))
        at += length
    return segments


def any_plan(longest: int) -> st.SearchStrategy[list[Segment]]:
    """Groups of a prompt and responses, and trees of any depth; a run may be empty, the first one is not."""
    groups = st.lists(
        st.tuples(st.integers(1, longest), st.lists(st.integers(0, longest - 1), max_size=4)),
        min_size=1,
        max_size=4,
    )
    runs = st.tuples(st.integers(0, longest), st.integers(0, 7))
    trees = st.tuples(st.integers(1, longest), st.lists(runs, max_size=7))
    return groups.map(plan) | trees.map(lambda tree: tree_plan([(tree[0], 0), *tree[1]]))


@settings(max_examples=25, deadline=None)
@given(
    segments=any_plan(8),
    window=st.none() | st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1), (2, 2)]),
    small=st.sampled_from([0, 60, 1 << 15]),
    softcap=st.sampled_from([None, None, 0.5]),
    has_sinks=st.booleans(),
    value_dim=st.sampled_from([6, 6, 4]),
    scores=st.sampled_from([7, 1 << 24]),
)
def test_output_and_gradient_are_those_of_a_loop(
    segments: list[Segment],
    window: int | None,
    heads: tuple[int, int],
    small: int,
    softcap: float | None,
    has_sinks: bool,
    value_dim: int,
    scores: int,
) -> None:
    n, (num_heads, kv_heads) = num_tokens(segments), heads
    generator = torch.Generator().manual_seed(n)
    shapes = ((num_heads, 6), (kv_heads, 6), (kv_heads, value_dim), (num_heads, value_dim))
    query, key, value, weight = (
        torch.randn(n, *shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in shapes
    )
    sinks = torch.randn(num_heads, dtype=torch.float64, generator=generator, requires_grad=True)
    options = {"scaling": 0.3, "window": window, "softcap": softcap, "sinks": sinks if has_sinks else None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            attention_buckets, "SMALL_BUCKET", small
        )  # 0: nothing unlike shares a call; large: everything does
        patch.setattr(attention_buckets, "FORMULA_SCORES", scores)
        out = PackedAttention(segments, device=CPU).attend(0, query, key, value, AttentionForm(**options))
        grads = torch.autograd.grad((out * weight).sum(), (query, key, value, sinks), allow_unused=True)
    tuples = [(s.start, s.length, s.prefix) for s in segments]
    wanted = packed_attention.attend(query, key, value, tuples, **options)
    torch.testing.assert_close(out, wanted, atol=1e-12, rtol=1e-12)
    wanted_grads = torch.autograd.grad((wanted * weight).sum(), (query, key, value, sinks), allow_unused=True)
    torch.testing.assert_close(grads, wanted_grads, atol=1e-11, rtol=1e-11)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.lists(st.integers(0, 300), max_size=8)), min_size=1, max_size=8
    )
)
def test_padding_is_bounded_for_any_lengths(blocks: list[tuple[int, list[int]]]) -> None:
    segments = plan(blocks)
    shapes = shapes_of(segments)
    padded, used = padded_and_used(segments)
    assert padded <= BUCKET_PADDING * used + SMALL_BUCKET * len(shapes)


def test_one_long_response_to_a_short_prompt_pads_no_other() -> None:
    # 1000 keys each, once as prompt and once as response: 990 + 10 and 10 + 990. In one call, 2 * 990 * 1000
    # entries would be computed for 10 * 1000 + 990 * 1000.
    segments = plan([(990, [10, 10]), (10, [990, 990])])
    shapes = shapes_of(segments)
    assert (2, 10, 1000) in shapes
    assert (2, 990, 1000) in shapes


def mix(name: str) -> list[Segment]:
    """Segments of one micro-batch of about the default budget, drawn with a fixed seed."""
    rng = np.random.default_rng(0)

    def lengths(median: float, spread: float, cap: int, count: int) -> list[int]:
        drawn = np.exp(np.log(median) + spread * rng.standard_normal(count))
        return np.clip(drawn.astype(int), 1, cap).tolist()

    match name:
        case "quickstart":  # 32 words, 8 short answers each
            return plan([(p, lengths(6, 0.3, 12, 8)) for p in rng.integers(20, 28, 32).tolist()])
        case "chat":  # prompts of 60 to 200 tokens, log-normal responses
            return plan([(p, lengths(45, 0.8, 256, 8)) for p in rng.integers(60, 200, 16).tolist()])
        case "mathematics":
            return plan([(p, lengths(120, 0.5, 400, 8)) for p in lengths(100, 0.4, 400, 16)])
        case "long answers":
            return plan([(p, lengths(250, 0.8, 1024, 8)) for p in rng.integers(100, 1000, 4).tolist()])
        case "supervised":  # every sequence alone
            return plan([(p, []) for p in lengths(150, 0.7, 1000, 90)])
        case "wild":
            return plan([(p, lengths(20, 1.5, 1000, 8)) for p in lengths(55, 1.2, 1000, 16)])
    raise ValueError(name)


# Golden: number of attention calls per layer. A change of the grouping shows here; more calls cost time, so
# does padding (next test).
CALLS = {
    "quickstart": 3,
    "chat": 14,
    "mathematics": 14,
    "long answers": 14,
    "supervised": 9,
    "wild": 21,
}


@pytest.mark.parametrize("name", CALLS)
def test_few_calls_and_little_padding_for_realistic_lengths(name: str) -> None:
    segments = mix(name)
    padded, used = padded_and_used(segments)
    assert len(shapes_of(segments)) == CALLS[name]
    assert padded < 2 * used


def test_a_plain_forward_call_says_what_is_missing() -> None:
    function = attention.AttentionInterface()[ATTENTION_NAME]
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="call it through strop.engines.causal_lm.CausalLM"):
        function(torch.nn.Linear(1, 1), query, query, query, None)


def test_an_attention_option_that_would_be_ignored_is_refused() -> None:
    function = attention.AttentionInterface()[ATTENTION_NAME]
    query = torch.zeros(1, 2, 3, 4)
    context = PackedAttention(plan([(3, [])]), device=CPU)
    with pytest.raises(ValueError, match="Linear uses attention option 'position_bias'"):
        function(torch.nn.Linear(1, 1), query, query, query, None, position_bias=query, strop_context=context)
