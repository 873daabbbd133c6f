"""Attention in C: the numbers and gradients of the formula, and of a token the same whatever is beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from default_cases import draws
from engines.test_attention_plan import any_plan, num_tokens, plan
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from strop.engines.attention import PackedAttention
from strop.engines.attention_form import AttentionForm
from strop.engines.cpu.attention import _Attend, cpu_plan
from strop.engines.cpu.library import update_library
from strop.engines.segments import Segment

pytestmark = pytest.mark.skipif(update_library() is None, reason="needs gcc")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    """As many here on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def states(segments: list[Segment], heads: int, kv_heads: int, dim: int) -> list[Tensor]:
    """Query, key and value, whose tokens and heads do not lie one after another, and a weight of each output."""
    generator = torch.Generator().manual_seed(0)
    count = num_tokens(segments)
    sizes = ((heads, count, dim), (kv_heads, count, dim), (kv_heads, count, dim))
    query, key, value = (torch.randn(size, generator=generator).transpose(0, 1) for size in sizes)
    return [query, key, value, torch.randn(count, heads, dim, generator=generator)]


def results(
    segments: list[Segment], tensors: list[Tensor], form: AttentionForm, dtype: torch.dtype
) -> list[Tensor]:
    """Output, and gradients by query, key and value of its sum with these weights; but in float64 those of C."""
    *inputs, weights = (tensor.detach().to(dtype) for tensor in tensors)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    output = PackedAttention(segments, device=CPU).attend(0, *inputs, form)
    is_compiled = isinstance(output.grad_fn, _Attend._backward_cls)  # type: ignore[attr-defined]
    assert is_compiled is (dtype != torch.float64)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


def check_against_float64(
    segments: list[Segment], tensors: list[Tensor], form: AttentionForm, *, atol: float, rtol: float = 1e-5
) -> None:
    """Numbers and gradients are those of the formula in float64."""
    ours, wanted = (results(segments, tensors, form, dtype) for dtype in (torch.float32, torch.float64))
    for tensor, expected in zip(ours, wanted, strict=True):
        torch.testing.assert_close(tensor.double(), expected, atol=atol, rtol=rtol)


@pytest.mark.draws
@settings(max_examples=draws(25, by_default=8), deadline=None)
@given(
    segments=any_plan(40),
    window=st.none() | st.integers(1, 50),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (8, 1)]),
    dim=st.sampled_from([16, 32, 48, 80]),
)
def test_numbers_and_gradients_are_those_of_float64(
    segments: list[Segment], window: int | None, heads: tuple[int, int], dim: int
) -> None:
    form = AttentionForm(scaling=dim**-0.5, window=window)
    tensors = states(segments, *heads, dim)
    check_against_float64(segments, tensors, form, atol=2e-5)


@settings(max_examples=15, deadline=None)
@given(segments=any_plan(40), window=st.none() | st.integers(1, 50), dim=st.sampled_from([16, 48]))
def test_in_bfloat16_only_what_goes_in_and_comes_out_is_rounded(
    segments: list[Segment], window: int | None, dim: int
) -> None:
    form = AttentionForm(scaling=dim**-0.5, window=window)
    tensors = [tensor.bfloat16() for tensor in states(segments, 6, 2, dim)]
    found, wanted = (results(segments, tensors, form, dtype) for dtype in (torch.bfloat16, torch.float64))
    for tensor, expected in zip(found, wanted, strict=True):
        assert tensor.dtype == torch.bfloat16
        assert (tensor.double() - expected).norm() <= 2**-7 * expected.norm() + 1e-3


def test_under_autocast_it_attends_in_the_precision_of_products() -> None:
    segments = plan([(20, [4])])
    *inputs, _ = states(segments, 2, 1, 16)
    packed, form = PackedAttention(segments, device=CPU), AttentionForm(scaling=0.2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = packed.attend(0, *inputs, form)
    assert torch.equal(output, packed.attend(0, *(tensor.bfloat16() for tensor in inputs), form))


def test_long_segments_are_cut_into_blocks_of_queries_and_keys() -> None:
    segments = plan([(700, [1, 300, 40]), (530, [])])
    form, tensors = AttentionForm(scaling=0.25), states(segments, 4, 2, 32)
    check_against_float64(segments, tensors, form, atol=1e-4, rtol=1e-4)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    segments = plan([(30, [20])])
    form, tensors = AttentionForm(scaling=40.0), states(segments, 2, 1, 16)
    check_against_float64(segments, tensors, form, atol=0.05, rtol=0.01)


def test_a_token_has_the_same_bits_whatever_is_beside_it() -> None:
    alone, together = plan([(37, [11, 5])]), plan([(37, [11, 5]), (64, [3, 90]), (9, [])])
    form, tensors = AttentionForm(scaling=0.2), states(together, 4, 2, 32)
    count = num_tokens(alone)
    first = results(alone, [tensor[:count] for tensor in tensors], form, torch.float32)
    for tensor, expected in zip(results(together, tensors, form, torch.float32), first, strict=True):
        assert torch.equal(tensor[:count], expected)


@pytest.mark.parametrize("blocks", [[(300, [20, 30]), (40, [7])], [(300, [])]], ids=["trees", "one"])
def test_the_number_of_threads_changes_no_bit(blocks: list[tuple[int, list[int]]]) -> None:
    segments = plan(blocks)
    form, tensors = AttentionForm(scaling=0.2), states(segments, 4, 2, 32)
    every: list[list[Tensor]] = []
    for threads in (1, 2, 8):
        torch.set_num_threads(threads)
        try:
            every.append(results(segments, tensors, form, torch.float32))
        finally:
            torch.set_num_threads(2)
    for found in every[1:]:
        for tensor, expected in zip(found, every[0], strict=True):
            assert torch.equal(tensor, expected)


def test_a_gradient_of_a_gradient_is_refused() -> None:
    segments = plan([(20, [4])])
    *inputs, _ = (tensor.requires_grad_() for tensor in states(segments, 2, 1, 16))
    output = PackedAttention(segments, device=CPU).attend(0, *inputs, AttentionForm(scaling=0.2))
    (grad, *_) = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_number_that_is_none_stays_one() -> None:
    segments = plan([(20, [4])])
    tensors = states(segments, 2, 1, 16)
    tensors[0][22] = float("nan")
    output, of_query, of_key, of_value = results(segments, tensors, AttentionForm(scaling=0.2), torch.float32)
    assert output[22].isnan().all()
    assert of_query[22].isnan().all()
    assert of_key[:23].isnan().all()
    assert of_value[:23].isnan().all()
    assert not output[:22].isnan().any()


@pytest.mark.parametrize(
    ("dim", "form"),
    [
        (12, AttentionForm(scaling=0.2)),
        (16, AttentionForm(scaling=0.2, chunk=4)),
        (16, AttentionForm(scaling=0.2, softcap=2.0)),
        (16, AttentionForm(scaling=0.2, by_formula=True)),
    ],
)
def test_other_forms_go_another_way(dim: int, form: AttentionForm) -> None:
    segments = plan([(20, [4])])
    chosen = cpu_plan(segments)
    assert chosen is not None
    assert chosen.attend(*states(segments, 2, 1, dim)[:3], form) is None


def test_keys_may_lie_behind_all_queries() -> None:
    """As those of tokens that a prefill has computed before; two requests begin with the same ones."""
    segments = [
        Segment(start=0, length=9, prefix=((20, 37),)),
        Segment(start=9, length=8, prefix=((20, 37),)),
        Segment(start=17, length=3),
    ]
    chosen = cpu_plan(segments)
    assert chosen is not None
    assert chosen.trees.tolist() == [[0, 2], [2, 3]]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(20, 4, 16, generator=generator)
    key, value = torch.randn(2, 37, 2, 16, generator=generator)
    tensors = [query, key, value, torch.randn(20, 4, 16, generator=generator)]
    form = AttentionForm(scaling=0.25)
    check_against_float64(segments, tensors, form, atol=1e-5)


def test_segments_that_see_later_tokens_have_no_plan() -> None:
    assert cpu_plan([Segment(start=0, length=9, blocks=((2, 5),))]) is None
    assert cpu_plan([Segment(start=0, length=4, prefix=((4, 9),)), Segment(start=4, length=5)]) is None
