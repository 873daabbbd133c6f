"""Triton kernels of root-mean-square norms: hidden states are read once and written once, in the precision of what
reads them, forward and backward.

torch's fused norm takes states and weight of one dtype and gives that: projections in half precision are widened for
it, and each product that reads its output rounds that anew, in a kernel and a tensor of its own. Where Triton or the
device is missing, fused_norms.py computes the same by torch. Not measured on a card yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.utils.triton import jit_of_any, tl, triton

MAX_DIM = 8192
"""Longest row that a program holds."""
_NUMBERS = 4096
"""Numbers that a program holds at one time, at least one row."""
_PROGRAMS = 528
"""Programs of a backward pass, each with a sum of its own for the weight: four for each multiprocessor of an H100."""


def norm(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """hidden [..., D] / sqrt(mean(hidden^2) + eps) times the weight [D], computed in float32, in this precision."""
    result: Tensor = _Norm.apply(hidden, weight, eps, dtype)
    return result


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        out, scales = normed(hidden := hidden.contiguous(), weight, eps, dtype)
        ctx.save_for_backward(hidden, weight, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, scales = ctx.saved_tensors
        gradient = normed_back(
            grads[0].contiguous(), hidden, weight, scales, trains_weight=ctx.needs_input_grad[1]
        )
        return *gradient, None, None


def normed(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The normed states [..., D], and the factor [N] of each of the N rows; `hidden` is contiguous."""
    dim, out = len(weight), torch.empty_like(hidden, dtype=dtype)
    count = hidden.numel() // dim
    scales = torch.empty(count, dtype=torch.float32, device=hidden.device)
    if count:
        rows, padded = _block(dim)
        _norm[(triton.cdiv(count, rows),)](
            hidden, weight.contiguous(), out, scales, count, dim, eps, ROWS=rows, DIM=padded, num_warps=8
        )
    return out, scales


def normed_back(
    grad: Tensor, hidden: Tensor, weight: Tensor, scales: Tensor, *, trains_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients by the states and by the weight; sums for the weight are added up in a fixed order."""
    dim, count, grad_hidden = len(weight), len(scales), torch.empty_like(hidden)
    rows, padded = _block(dim)
    programs = min(_PROGRAMS, -(-count // rows))
    # Each program writes its own, none where the weight is frozen.
    sums = hidden.new_empty(programs if trains_weight else 1, dim, dtype=torch.float32)
    if count:
        _norm_back[(programs,)](
            grad, hidden, weight.contiguous(), scales, grad_hidden, sums, count, dim,
            ROWS=rows, DIM=padded, TRAINS=trains_weight, num_warps=8,
        )  # fmt: skip
    return grad_hidden, sums.sum(0).to(weight.dtype) if trains_weight else None


def _block(dim: int) -> tuple[int, int]:
    """Rows of a program, and numbers of each."""
    padded = triton.next_power_of_2(dim)
    return max(1, _NUMBERS // padded), padded


@jit_of_any("count")
def _norm(hidden, weight, out, scales, count, dim, eps, ROWS: tl.constexpr, DIM: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, DIM)
    inside = (rows < count)[:, None] & (columns < dim)[None, :]
    at = rows[:, None] * dim + columns[None, :]
    x = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + columns, mask=columns < dim, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / dim + eps)
    tl.store(out + at, (x * scale[:, None] * w[None, :]).to(out.dtype.element_ty), mask=inside)
    tl.store(scales + rows, scale, mask=rows < count)


@jit_of_any("count")
def _norm_back(
    grad, hidden, weight, scales, grad_hidden, sums, count, dim,
    ROWS: tl.constexpr, DIM: tl.constexpr, TRAINS: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, DIM)
    w = tl.load(weight + columns, mask=columns < dim, other=0.0).to(tl.float32)
    total = tl.zeros((DIM,), tl.float32)
    for start in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS).to(tl.int64)
        inside = (rows < count)[:, None] & (columns < dim)[None, :]
        at = rows[:, None] * dim + columns[None, :]
        scale = tl.load(scales + rows, mask=rows < count, other=0.0)
        x = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if TRAINS:
            total += tl.sum(g * x, 0)
        g = g * w[None, :]
        share = tl.sum(g * x, 1) / dim
        result = (g - x * share[:, None]) * scale[:, None]
        tl.store(grad_hidden + at, result.to(grad_hidden.dtype.element_ty), mask=inside)
    if TRAINS:
        tl.store(sums + tl.program_id(0).to(tl.int64) * dim + columns, total, mask=columns < dim)
