from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from references import policy_losses as reference
from strop.algorithms.losses.distillation import reverse_kl_terms, topk_forward_kl


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_forward_kl_over_the_top_tokens() -> None:
    # Teacher 0.5, 0.25 against 0.25, 0.25 of the policy: 0.5 ln 2 + 0; masses 0.75 and 0.5.
    # The others as one: 0.25 against 0.5 adds 0.25 ln(1/2), in all 0.25 ln 2.
    log_probs = double([[0.25, 0.25]]).log().requires_grad_()
    teacher = double([[0.5, 0.25]]).log()
    got = topk_forward_kl(log_probs, teacher)
    torch.testing.assert_close(got.terms.detach(), double([0.5 * math.log(2)]))
    (by_log_probs,) = torch.autograd.grad(got.terms.sum(), log_probs)
    torch.testing.assert_close(by_log_probs, double([[-0.5, -0.25]]))
    torch.testing.assert_close(got.statistics["student_mass"], double([0.5]))
    torch.testing.assert_close(got.statistics["teacher_mass"], double([0.75]))
    whole = topk_forward_kl(log_probs, teacher, with_tail=True)
    torch.testing.assert_close(whole.terms.detach(), double([0.25 * math.log(2)]))


def test_overlap_of_the_top_tokens_of_both() -> None:
    # Of two tokens the second is also in the policy's top two: half; its 0.25 (ln 0.125 - ln 0.25) = -0.25 ln 2.
    # In the second row none is, and there is no token to take a mean of.
    log_probs = double([[0.25, 0.125], [0.25, 0.125]]).log()
    teacher = double([[0.5, 0.25], [0.5, 0.25]]).log()
    got = topk_forward_kl(log_probs, teacher, is_likely=torch.tensor([[False, True], [False, False]]))
    torch.testing.assert_close(got.statistics["overlap_ratio"], double([0.5, 0.0]))
    torch.testing.assert_close(got.statistics["overlap_token_advantage"], double([-0.25 * math.log(2), 0.0]))


@given(
    student=st.lists(st.floats(0.01, 1), min_size=3, max_size=6),
    teacher=st.lists(st.floats(0.01, 1), min_size=3, max_size=6),
    with_tail=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_forward_kl_equals_the_reference(student: list[float], teacher: list[float], with_tail: bool) -> None:
    k = min(len(student), len(teacher)) - 1
    logs = [[math.log(x / math.fsum(xs)) for x in xs[:k]] for xs in (student, teacher)]
    got = topk_forward_kl(double([logs[0]]), double([logs[1]]), with_tail=with_tail)
    expected = reference.forward_kl(logs[0], logs[1], with_tail)
    assert got.terms.item() == pytest.approx(expected, abs=1e-10)
    if with_tail:
        assert got.terms.item() > -1e-12


def test_forward_kl_is_zero_and_flat_where_the_policy_is_the_teacher() -> None:
    logits = torch.randn(
        2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()
    log_probs = logits.log_softmax(-1)
    for k, with_tail in ((5, False), (3, True)):
        got = topk_forward_kl(log_probs[:, :k], log_probs[:, :k].detach(), with_tail=with_tail)
        (by_logits,) = torch.autograd.grad(got.terms.sum(), logits, retain_graph=True)
        torch.testing.assert_close(got.terms.detach(), torch.zeros(2, dtype=torch.float64))
        torch.testing.assert_close(by_logits, torch.zeros_like(logits), atol=1e-12, rtol=0)


def test_forward_kl_with_all_mass_in_the_top_tokens_is_finite() -> None:
    log_probs = torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    got = topk_forward_kl(log_probs, torch.tensor([[0.5, 0.5]]).log(), with_tail=True)
    (by_log_probs,) = torch.autograd.grad(got.terms.sum(), log_probs)
    assert torch.isfinite(by_log_probs).all()


def test_forward_kl_refuses_columns_of_different_tokens() -> None:
    with pytest.raises(ValueError, match=r"log-probs have shape \(1, 2\) and the teacher's \(1, 3\)"):
        topk_forward_kl(torch.zeros(1, 2), torch.zeros(1, 3))


def test_gradient_of_the_reverse_kl_is_right_in_expectation() -> None:
    # Over all tokens of a small vocabulary, weighted by the policy: the expectation is exact, and must be the
    # gradient of sum p (log p - log q).
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((log_probs.exp() * (log_probs - teacher)).sum(), logits, retain_graph=True)
    policy = log_probs.detach().exp()
    got = reverse_kl_terms(log_probs, teacher)
    (seen,) = torch.autograd.grad((policy * got.terms).sum(), logits, retain_graph=True)
    torch.testing.assert_close(seen, exact)
    value = (policy * got.terms.detach()).sum()
    torch.testing.assert_close(value, (policy * (log_probs.detach() - teacher)).sum())
    (plain,) = torch.autograd.grad(
        (policy * reverse_kl_terms(log_probs, teacher, kind="k1").terms).sum(), logits
    )
    torch.testing.assert_close(plain, torch.zeros_like(plain), atol=1e-12, rtol=0)
    torch.testing.assert_close(got.statistics["reverse_kl"], (log_probs - teacher).detach())
