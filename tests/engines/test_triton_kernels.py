"""Triton's kernels of the log-prob head and of rotations beside torch's operations: on a GPU (`make test-gpu`), or in
Triton's interpreter on any processor (`make triton`)."""

from __future__ import annotations

import os

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from strop.engines import head_kernels
from strop.engines.head import _gradient, _statistics
from strop.engines.rotary_kernels import triton_turned
from strop.utils.triton import has_kernels, triton

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.skipif(triton is None, reason="needs Triton: make triton")]
if not IS_INTERPRETED:
    pytestmark.append(pytest.mark.gpu)

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
ROWS, VOCAB = (5, 9_000) if IS_INTERPRETED else (33, 50_000)
"""More than one block of a row; on a card as much as a model has, which an interpreter takes long for."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card has them; the head takes them on a processor too, where an interpreter runs them."""
    if IS_INTERPRETED:
        monkeypatch.setattr("strop.engines.head.has_kernels", lambda device: True)
    else:
        assert has_kernels(DEVICE)


@pytest.mark.parametrize("vocab", [300, 4096, VOCAB])
def test_statistics_of_logits_are_those_of_torch(vocab: int) -> None:
    logits = 4 * torch.randn(ROWS, vocab, device=DEVICE)
    normalizers, means = head_kernels.statistics(logits)
    assert all(map(torch.equal, _statistics(logits), (normalizers, means))), "the head takes them"
    probs = torch.softmax(logits.double(), -1)
    torch.testing.assert_close(
        normalizers.double(), torch.logsumexp(logits.double(), -1), atol=1e-5, rtol=1e-6
    )
    torch.testing.assert_close(means.double(), (probs * logits.double()).sum(-1), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_targets", [1, 4])
@pytest.mark.parametrize("has_entropy", [False, True])
def test_the_gradient_of_logits_is_that_of_torch(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, num_targets: int, has_entropy: bool
) -> None:
    logits = 3 * torch.randn(ROWS, VOCAB, device=DEVICE)
    targets = torch.randint(0, VOCAB, (ROWS, num_targets), device=DEVICE)
    targets[0] = -1  # none of these tokens
    grads, entropies = torch.randn(ROWS, num_targets, device=DEVICE), torch.randn(ROWS, device=DEVICE)
    statistics = _statistics(logits)
    given = (targets, grads, entropies if has_entropy else None)
    normalizers, means = statistics
    found = head_kernels.gradient(logits, normalizers, means, *given, slope=0.7, dtype=dtype)
    assert torch.equal(_gradient(logits, statistics, *given, slope=0.7, dtype=dtype), found), (
        "the head takes it"
    )
    assert found.dtype == dtype
    monkeypatch.setattr("strop.engines.head.has_kernels", lambda device: False)
    wanted = _gradient(logits, statistics, *given, slope=0.7, dtype=dtype)
    is_exact = dtype == torch.float32
    torch.testing.assert_close(
        found, wanted, atol=1e-5 if is_exact else 1e-2, rtol=1e-4 if is_exact else 1e-2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim"), [(16, 128), (3, 16)])
def test_rotated_states_and_their_gradient_are_those_of_transformers(
    dtype: torch.dtype, heads: int, dim: int
) -> None:
    projected = torch.randn(1, 7, heads, dim, device=DEVICE, dtype=dtype, requires_grad=True)
    angles = torch.randn(1, 7, dim, device=DEVICE)
    cosines, sines = angles.cos(), angles.sin()
    states, weight = projected.transpose(1, 2), torch.randn(1, heads, 7, dim, device=DEVICE)
    wanted = apply_rotary_pos_emb(states, states, cosines, sines)[0]
    (wanted_gradient,) = torch.autograd.grad((wanted * weight).sum(), states)
    found = triton_turned(states.detach(), cosines, sines, torch.float32, is_back=False)
    gradient = triton_turned(weight, cosines, sines, dtype, is_back=True)
    assert (found.dtype, gradient.dtype) == (torch.float32, dtype)
    for one, other in ((found, wanted), (gradient, wanted_gradient)):
        torch.testing.assert_close(one, other, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0.01)
