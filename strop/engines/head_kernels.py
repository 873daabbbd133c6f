"""Triton kernels of the log-prob head: what log-probs and entropy need of logits in one reading, their gradient in one
reading and writing.

In torch's own operations these are some twenty passes over [tokens, vocabulary], which take ten times as long as the
products on an H100. Where Triton or the device is missing, head.py computes the same by torch. Last measured:
benchmarks/RESULTS.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.utils.triton import jit, tl, triton

BLOCK = 4096
"""Logits that a program reads at one time."""


def statistics(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp_v z_v [N] and mean_v z_v under softmax(z) [N], of logits z [N, V] float32."""
    normalizers, means = (logits.new_empty(len(logits)) for _ in range(2))
    if len(logits):
        _statistics[(len(logits),)](
            logits, logits.stride(0), logits.shape[1], normalizers, means, BLOCK=BLOCK, num_warps=8
        )
    return normalizers, means


def gradient(
    logits: Tensor,
    normalizers: Tensor,
    means: Tensor,
    targets: Tensor,
    grad_log_probs: Tensor,
    grad_entropies: Tensor | None,
    *,
    slope: float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient [N, V] by hidden W^T, for z = slope (hidden W^T) + ..., in this precision.

    With g_c of target t_c and h of the entropy: slope (sum_c g_c ([v = t_c] - p_v) - h p_v (z_v - mean)).

    Args:
        logits: [N, V] float32.
        normalizers, means: as `statistics` gives them.
        targets: [N, C] int64.
        grad_log_probs: [N, C].
        grad_entropies: [N] or None.
        slope: derivative of the logits by the products.
        dtype: of the result.
    """
    rows, vocab = logits.shape
    out = torch.empty_like(logits, dtype=dtype)
    entropies = normalizers if grad_entropies is None else grad_entropies.float().contiguous()
    if rows:
        _gradient[(rows, triton.cdiv(vocab, BLOCK))](
            logits, logits.stride(0), vocab, normalizers, means, targets.contiguous(),
            grad_log_probs.float().contiguous(), entropies,
            slope, out, NUM_TARGETS=targets.shape[1], HAS_ENTROPY=grad_entropies is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return out


@jit
def _statistics(logits, stride, vocab, normalizers, means, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    # Each lane keeps the largest logit it saw, and sums relative to it; the lanes meet at the end.
    largest = tl.full((BLOCK,), -1e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        z = tl.load(logits + row * stride + start + columns, mask=inside, other=-1e38)
        new = tl.maximum(largest, z)
        shrink = tl.exp(largest - new)
        weight = tl.where(inside, tl.exp(z - new), 0.0)
        total = total * shrink + weight
        weighted = weighted * shrink + weight * z
        largest = new
    top = tl.max(largest, 0)
    shrink = tl.exp(largest - top)
    all_total = tl.sum(total * shrink, 0)
    all_weighted = tl.sum(weighted * shrink, 0)
    tl.store(normalizers + row, top + tl.log(all_total))
    tl.store(means + row, all_weighted / all_total)


@jit
def _gradient(
    logits, stride, vocab, normalizers, means, targets, grad_log_probs, grad_entropies, slope, out,
    NUM_TARGETS: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    z = tl.load(logits + row * stride + columns, mask=inside, other=0.0)
    p = tl.exp(z - tl.load(normalizers + row))
    grad = tl.zeros((BLOCK,), tl.float32)
    for c in tl.static_range(NUM_TARGETS):
        g = tl.load(grad_log_probs + row * NUM_TARGETS + c)
        t = tl.load(targets + row * NUM_TARGETS + c)
        grad += g * (tl.where(columns == t, 1.0, 0.0) - p)
    if HAS_ENTROPY:
        grad -= tl.load(grad_entropies + row) * p * (z - tl.load(means + row))
    tl.store(out + row * vocab + columns, (grad * slope).to(out.dtype.element_ty), mask=inside)
