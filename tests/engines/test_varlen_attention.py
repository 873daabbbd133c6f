"""The plan of attention over unequal lengths: what its kernel is given, and what comes out, beside a slow loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention_plan import any_plan, plan
from torch import Tensor

from references import packed_attention
from strop.engines.attention import PackedAttention
from strop.engines.attention_form import AttentionForm
from strop.engines.segments import Segment
from strop.engines.varlen import half_of, varlen_plan

CPU = torch.device("cpu")


def kernel_of_docs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    max_queries: int,
    max_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """What varlen_attn says of itself: sequence by sequence, causal and window counted from the last key."""
    assert query_ends.dtype == key_ends.dtype == torch.int32
    out = torch.zeros_like(query)
    spans = zip(query_ends[:-1], query_ends[1:], key_ends[:-1], key_ends[1:], strict=True)
    for q0, q1, k0, k1 in ((int(a), int(b), int(c), int(d)) for a, b, c, d in spans):
        assert q1 - q0 <= max_queries
        assert k1 - k0 <= max_keys
        for i in range(q1 - q0):
            last = (k1 - k0) - (q1 - q0) + i
            first = 0 if window_size[0] < 0 else max(0, last - window_size[0])
            for head in range(query.shape[1]):
                shared = head // (query.shape[1] // key.shape[1])
                keys, values = (part[k0 + first : k0 + last + 1, shared] for part in (key, value))
                weights = torch.softmax(keys @ query[q0 + i, head] * scale, dim=0)
                out[q0 + i, head] = weights @ values
    return out


@settings(max_examples=15, deadline=None)
@given(
    segments=any_plan(6),
    window=st.none() | st.integers(1, 9),
    heads=st.sampled_from([(1, 1), (4, 2)]),
)
def test_one_call_attends_as_a_loop_over_tokens_does(
    segments: list[Segment], window: int | None, heads: tuple[int, int]
) -> None:
    n = sum(segment.length for segment in segments)
    generator = torch.Generator().manual_seed(n)
    query, key, value = (
        torch.randn(n, count, 8, dtype=torch.float64, generator=generator)
        for count in (heads[0], heads[1], heads[1])
    )
    form = AttentionForm(scaling=0.4, window=window)
    found = varlen_plan(segments, CPU)
    assert found is not None
    out = found.attend(query, key, value, form, kernel_of_docs)
    tuples = [(s.start, s.length, s.prefix) for s in segments]
    wanted = packed_attention.attend(query, key, value, tuples, scaling=0.4, window=window)
    torch.testing.assert_close(out, wanted, atol=1e-12, rtol=1e-12)


def test_prefixes_behind_the_tokens_are_keys_alone() -> None:
    # As generation continues a prompt: two new tokens behind three that were computed before, which lie at 2, 3 and 4.
    segments = [Segment(start=0, length=2, prefix=((2, 5),))]
    found = varlen_plan(segments, CPU)
    assert found is not None
    assert found.key_index is not None
    assert found.key_index.tolist() == [2, 3, 4, 0, 1]
    assert (found.query_ends.tolist(), found.key_ends.tolist()) == ([0, 2], [0, 5])
    assert (found.max_queries, found.max_keys) == (2, 5)


def test_prompts_alone_are_not_gathered() -> None:
    found = varlen_plan(plan([(3, []), (5, [])]), CPU)
    assert found is not None
    assert found.key_index is None
    assert found.key_ends.tolist() == [0, 3, 8]


@pytest.mark.parametrize(
    "segments",
    [
        pytest.param(
            [Segment(start=0, length=4, blocks=((1, 3),))], id="an image whose tokens see each other"
        ),
        pytest.param(
            [Segment(start=4, length=4), Segment(start=0, length=4)], id="not in the order of the row"
        ),
    ],
)
def test_what_the_kernel_has_not_goes_another_way(segments: list[Segment]) -> None:
    assert varlen_plan(segments, CPU) is None


@pytest.mark.parametrize(
    ("change", "dims"),
    [
        ({}, (16, 16)),
        ({"softcap": 2.0}, None),
        ({"chunk": 4}, None),
        ({"by_formula": True}, None),
        ({"sinks": torch.zeros(2)}, None),
        ({}, (12, 12)),
        ({}, (24, 16)),
        ({}, (264, 264)),
    ],
)
def test_which_layers_the_kernel_computes(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], dims: tuple[int, int] | None
) -> None:
    monkeypatch.setattr("strop.engines.varlen.runs_on", lambda device: True)
    query_dim, value_dim = dims or (16, 16)
    query, value = torch.zeros(3, 2, query_dim), torch.zeros(3, 2, value_dim, dtype=torch.bfloat16)
    found = half_of(query, value, AttentionForm(scaling=1.0, **change))
    is_plain = change == {} and dims == (16, 16)
    assert found == (torch.bfloat16 if is_plain else None)


def test_wide_values_follow_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.engines.varlen.runs_on", lambda device: True)
    wide, form = torch.zeros(3, 2, 16), AttentionForm(scaling=1.0)
    assert half_of(wide, wide, form) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert half_of(wide, wide, form) == torch.bfloat16


def test_packed_attention_asks_the_plan_where_the_device_has_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    segments = plan([(3, [2, 4])])
    query, key, value = (torch.randn(9, 2, 16).to(torch.bfloat16) for _ in range(3))
    form = AttentionForm(scaling=0.25)
    wanted = PackedAttention(segments, device=CPU).attend(0, query, key, value, form)
    monkeypatch.setattr("strop.engines.varlen.runs_on", lambda device: True)
    monkeypatch.setattr("strop.engines.attention.runs_on", lambda device: True)
    monkeypatch.setattr("strop.engines.varlen.flash_attention", lambda: kernel_of_docs)
    monkeypatch.setattr(PackedAttention, "_attend_in_buckets", None)
    found = PackedAttention(segments, device=CPU).attend(0, query, key, value, form)
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.02)
