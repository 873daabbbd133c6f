"""Triton's kernels of the log-prob head, of norms, gates, rotations and of sampling beside torch's operations: on a GPU
(`make test-gpu`), or in Triton's interpreter on any processor (`make triton`)."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from references import layer_kernels as references
from strop.engines import gate_kernels, head_kernels
from strop.engines.head import BANNED_LOGIT, _gradient, _statistics
from strop.engines.norm_kernels import norm
from strop.engines.rotary_kernels import triton_turned
from strop.rollout.native import layer_kernels, sample_kernel, sampling
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
        monkeypatch.setattr(sampling, "has_kernels", lambda device: True)
        monkeypatch.setattr(sampling.kernel, "sample", lambda *given: None)
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


@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize(("count", "dim"), [(1, 16), (7, 24), (70, 128), (3, 5000)])
def test_norms_and_their_gradients_are_those_of_torch(
    source: torch.dtype, target: torch.dtype, count: int, dim: int
) -> None:
    hidden = torch.randn(1, count, dim, device=DEVICE).to(source).requires_grad_()
    weight = (1 + torch.randn(dim, device=DEVICE)).requires_grad_()
    found = norm(hidden, weight, 1e-5, target)
    assert found.dtype == target
    gradient = torch.randn(found.shape, device=DEVICE).to(target)
    grads = torch.autograd.grad(found, (hidden, weight), gradient)
    wide = hidden.detach().double().requires_grad_()
    wide_weight = weight.detach().double().requires_grad_()
    wanted = F.rms_norm(wide, (dim,), wide_weight, 1e-5)
    wanted_grads = torch.autograd.grad(wanted, (wide, wide_weight), gradient.double())
    assert (grads[0].dtype, grads[1].dtype) == (source, torch.float32)
    for one, other in ((found, wanted), *zip(grads, wanted_grads, strict=True)):
        exact = one.dtype == torch.float32
        torch.testing.assert_close(
            one.double(), other, atol=2e-4 if exact else 0.02, rtol=1e-4 if exact else 0.01
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 5, 3), (40, 77)])
def test_gates_and_their_gradients_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    gates, ups = (
        (3 * torch.randn(shape, device=DEVICE).to(dtype)).requires_grad_(),
        torch.randn(shape, device=DEVICE),
    )
    ups = ups.to(dtype).requires_grad_()
    grad = torch.randn(shape, device=DEVICE).to(dtype)
    found = gate_kernels.product_of(gates.detach(), ups.detach())
    grads = gate_kernels.gradients_of(grad, gates.detach(), ups.detach())
    wanted = F.silu(gates.double()) * ups.double()
    wanted_grads = torch.autograd.grad(wanted, (gates, ups), grad.double())
    for one, other in ((found, wanted), *zip(grads, wanted_grads, strict=True)):
        assert one.dtype == dtype
        exact = dtype == torch.float32
        torch.testing.assert_close(
            one.double(), other.double(), atol=1e-5 if exact else 0.02, rtol=1e-5 if exact else 0.01
        )


def test_the_weight_of_a_frozen_norm_has_no_gradient() -> None:
    hidden = torch.randn(5, 16, device=DEVICE, requires_grad=True)
    norm(hidden, torch.ones(16, device=DEVICE), 1e-5, torch.float32).sum().backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None


WAYS = ((1.0, 1.0, 0), (0.0, 1.0, 0), (0.7, 1.0, 0), (2.0, 1.0, 0), (1.0, 0.8, 0), (0.7, 1.0, 3))
"""Temperature, top-p and top-k."""


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02}


@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize(
    ("stream_dtype", "dtype"),
    [(torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize(("count", "dim"), [(1, 16), (7, 24), (5, 5000)])
def test_the_norm_of_a_sum_is_that_of_torch(
    count: int, dim: int, stream_dtype: torch.dtype, dtype: torch.dtype, has_delta: bool
) -> None:
    stream = torch.randn(count, dim, device=DEVICE).to(stream_dtype)
    delta = torch.randn(count, dim, device=DEVICE).to(dtype) if has_delta else None
    weight, sums = torch.randn(dim, device=DEVICE), stream.clone()
    wanted = references.add_and_norm(sums, delta, weight, 1e-6, dtype)
    found = layer_kernels.add_and_norm(stream, delta, weight, 1e-6, dtype)
    torch.testing.assert_close(found, wanted, **tolerance(dtype))
    torch.testing.assert_close(stream, sums, **tolerance(stream_dtype))


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(16, 8, 128), (3, 1, 16), (4, 4, 64), (9, 3, 2), (7, 1, 32)]
)
def test_heads_of_one_product_are_those_of_torch(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype, has_norms: bool
) -> None:
    states = torch.randn(5, (heads + 2 * kv_heads) * dim, device=DEVICE).to(dtype)
    norms = (torch.randn(dim, device=DEVICE), torch.randn(dim, device=DEVICE)) if has_norms else None
    cosines, sines = torch.rand(2, 5, dim, device=DEVICE)  # halves that differ show which is read
    given = (states, norms, 1e-6, cosines, sines, (heads, kv_heads))
    for found, wanted in zip(layer_kernels.turn_heads(*given), references.turn_heads(*given), strict=True):
        assert found.is_contiguous()
        torch.testing.assert_close(found, wanted, **tolerance(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "width"), [(1, 5), (6, 1024), (3, 2500)])
def test_the_gate_of_two_halves_is_that_of_torch(dtype: torch.dtype, count: int, width: int) -> None:
    states = 3 * torch.randn(count, 2 * width, device=DEVICE).to(dtype)
    torch.testing.assert_close(
        layer_kernels.gate_halves(states), references.gate_halves(states), **tolerance(dtype)
    )


def rows_of(count: int) -> sampling.Rows:
    """Rows that sample in one way each, with keys of their own."""
    rows = np.zeros(count, dtype=sampling.SEQUENCE)
    for row in range(count):
        rows[["temperature", "top_p", "top_k"]][row] = WAYS[row % len(WAYS)]
    rows["key"] = np.arange(count)
    return rows


def logits_of(count: int, vocab: int) -> torch.Tensor:
    """Rows apart in memory, with tokens that are banned, the first one too."""
    logits = 3 * torch.randn(count, 2 * vocab, device=DEVICE)[:, :vocab]
    logits[:, ::3] = BANNED_LOGIT
    return logits


@pytest.mark.parametrize("vocab", [5, 1024, 3000])
def test_tokens_by_the_kernels_are_those_by_torchs_operations(
    monkeypatch: pytest.MonkeyPatch, vocab: int
) -> None:
    logits, drawn = logits_of(36, vocab), []
    for has_kernel in (True, False):
        monkeypatch.setattr(sampling, "has_kernels", lambda device, has_kernel=has_kernel: has_kernel)
        drawn.append(sampling.next_tokens(logits, rows_of(36)))
    (tokens, log_probs), (wanted, wanted_log_probs) = drawn
    assert torch.equal(tokens, wanted)
    assert bool((tokens % 3 != 0).all())
    torch.testing.assert_close(log_probs, wanted_log_probs)


def test_a_row_by_the_kernels_is_to_the_bit_what_it_is_alone() -> None:
    logits = logits_of(12, 3000)
    tokens, log_probs = sampling.next_tokens(logits, rows_of(12))
    for row in range(12):
        alone = sampling.next_tokens(logits[row : row + 1], rows_of(12)[row : row + 1])
        assert (alone[0].item(), alone[1].item()) == (tokens[row].item(), log_probs[row].item())


def test_the_ends_of_the_cumulative_distribution_are_tokens_with_a_probability() -> None:
    vocab, size = 3 * sample_kernel.BLOCK, sample_kernel.BLOCK
    logits = torch.full((4, vocab), BANNED_LOGIT, device=DEVICE)
    logits[:, size + 200 : size + 400] = 0.0  # blocks before and behind have none
    numbers = torch.tensor([0.0, 2.0**-53, 1 - 2.0**-53, 0.5], dtype=torch.float64)
    draws = torch.stack([numbers, torch.ones(4)], dim=1).to(DEVICE)
    tokens, log_probs, _ = sample_kernel.draw(logits, draws)
    assert (tokens - size).tolist() == [200, 200, 399, 300]
    torch.testing.assert_close(log_probs, torch.full((4,), -math.log(200), device=DEVICE))


def test_rounding_of_a_blocks_sum_finds_no_token_without_a_probability() -> None:
    """Sums of blocks and of the numbers in one are rounded in other ways, so a block may end before the number that was
    looked for, or begin behind it."""
    size, count = sample_kernel.BLOCK, 400
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(3 * size, generator=generator).to(DEVICE)
        logits[size : size + 12] = logits[2 * size :] = BANNED_LOGIT
        exps = logits.double().exp()
        end = exps[:size].sum() / exps.sum() + torch.linspace(
            -4e-7, 4e-7, count, dtype=torch.float64, device=DEVICE
        )
        draws = torch.stack([end, torch.ones_like(end)], dim=1)
        tokens, log_probs, _ = sample_kernel.draw(logits.expand(count, -1), draws)
        assert {size - 1, size + 12} == set(tokens.tolist())
        assert bool((log_probs > -30).all())


def test_numbers_that_are_none_give_a_token_and_a_log_prob_that_is_none() -> None:
    tokens, log_probs = sampling.next_tokens(torch.full((6, 3000), math.nan, device=DEVICE), rows_of(6))
    assert all(0 <= token < 3000 for token in tokens.tolist())
    assert log_probs.isnan().all()
