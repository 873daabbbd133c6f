"""What a GPU computes by kernels of its own, beside the same by torch's operations: head, attention, rotations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from strop.engines.attention import PackedAttention
from strop.engines.attention_form import AttentionForm
from strop.engines.head import Head
from strop.engines.parallel.context import context_layout
from strop.engines.rotary_kernels import rotate
from strop.engines.segments import Segment

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


def test_log_probs_in_half_precision_are_near_those_in_full() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(700, 256, device=DEVICE, requires_grad=True)
    weight = (0.05 * torch.randn(30_000, 256, device=DEVICE)).requires_grad_()
    targets = torch.randint(0, 30_000, (700,), device=DEVICE)
    results = []
    for dtype in (torch.bfloat16, None):
        pair = Head(weight, product_dtype=dtype).log_probs(hidden, targets, temperature=0.9)
        grads = torch.autograd.grad(pair[0].sum() + 0.1 * pair[1].sum(), (hidden, weight))
        assert {grad.dtype for grad in grads} == {torch.float32}
        results.append((*pair, *grads))
    for found, wanted in zip(*results, strict=True):
        assert float((found - wanted).norm() / wanted.norm()) < 0.01


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (4, 4)])
def test_one_call_of_flash_attention_is_the_buckets_attention(
    window: int | None, heads: int, kv_heads: int
) -> None:
    segments, at = [], 0
    for prompt, answers in ((9, (4, 70, 1)), (33, ()), (1, (12,))):
        start = at
        segments.append(Segment(start=at, length=prompt))
        at += prompt
        for length in answers:
            segments.append(Segment(start=at, length=length, prefix=((start, start + prompt),)))
            at += length
    torch.manual_seed(0)
    leaves = [
        torch.randn(at, count, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    ]
    weight = torch.randn(at, heads, 64, device=DEVICE, dtype=torch.bfloat16)
    form = AttentionForm(scaling=0.125, window=window)
    plan = PackedAttention(segments, device=DEVICE)
    assert plan._varlen is not None
    results = []
    for attend in (plan.attend, lambda layer, *rest: plan._attend_in_buckets(*rest)):
        out = attend(0, *leaves, form)
        results.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
    for found, wanted in zip(*results, strict=True):
        assert float((found - wanted).float().norm() / wanted.float().norm()) < 0.02


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (3, 1)])
def test_queries_of_a_context_rank_see_what_they_see_in_the_whole_row(
    window: int | None, heads: int, kv_heads: int
) -> None:
    segments = [Segment(start=0, length=150), Segment(start=150, length=9)]
    segments += [Segment(start=159, length=70, prefix=((150, 159),))]
    num_tokens, num_ranks = 229, 4
    torch.manual_seed(0)
    leaves = [
        torch.randn(num_tokens, count, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    ]
    weight = torch.randn(num_tokens, heads, 64, device=DEVICE, dtype=torch.bfloat16)
    form = AttentionForm(scaling=0.125, window=window)
    layout = context_layout(segments, num_tokens, num_ranks)
    order = layout.tokens.flatten().to(DEVICE)

    def divided(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        placed = [F.pad(row, (0, 0, 0, 0, 0, len(order) - num_tokens))[order] for row in (query, key, value)]
        outputs = []
        for rank, queries in enumerate(placed[0].chunk(num_ranks)):
            plan = PackedAttention(layout.segments[rank], device=DEVICE, places=layout.places(rank))
            assert plan._varlen is not None
            outputs.append(plan.attend(0, queries, *placed[1:], form))
        return torch.cat(outputs)[layout.where[:num_tokens].to(DEVICE)]

    whole = PackedAttention(segments, device=DEVICE)
    results = []
    for out in (divided(*leaves), whole._attend_in_buckets(*leaves, form)):
        results.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
    for found, wanted in zip(*results, strict=True):
        assert float((found - wanted).float().norm() / wanted.float().norm()) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(16, 128), (3, 16)])
def test_rotated_states_and_their_gradient_are_those_of_transformers(
    dtype: torch.dtype, heads: int, dim: int
) -> None:
    torch.manual_seed(0)
    projected = torch.randn(1, 37, heads, dim, device=DEVICE, dtype=dtype, requires_grad=True)
    angles = torch.randn(1, 37, dim, device=DEVICE)
    cosines, sines = angles.cos(), angles.sin()
    states = projected.transpose(1, 2)
    weight = torch.randn(1, heads, 37, dim, device=DEVICE)
    results = []
    for function in (rotate, lambda *given: apply_rotary_pos_emb(given[0], given[0], *given[1:])[0]):
        out = function(states, cosines, sines)
        results.append((out, torch.autograd.grad((out * weight).sum(), projected)[0]))
    assert results[0][0].dtype == torch.float32
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0.01)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert rotate(states, cosines, sines).dtype == torch.bfloat16
