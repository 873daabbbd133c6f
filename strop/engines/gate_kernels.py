"""The gate of a feed-forward part in one kernel of Triton, forward and backward: silu(gates) times ups.

In torch's operations they are two kernels forward and three backward, and the product's factor silu(gates), as large as
both, is kept for the backward pass. Where Triton or the device is missing, torch computes the same. Not measured on a
card yet.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from strop.engines.plain_gates import is_plain_gate
from strop.utils.triton import has_kernels, jit, tl, triton

_NUMBERS = 1024
"""Numbers that a program computes."""


def use_gate_kernel(module: nn.Module) -> int:
    """Let the plain gated feed-forward parts of a model compute by the kernel; how many do."""
    parts = [part for part in module.modules() if is_plain_gate(part)]
    for part in parts:
        part.forward = MethodType(_forward, part)
    return len(parts)


def _forward(part: Any, hidden: Tensor) -> Tensor:
    output: Tensor = part.down_proj(gated(part.gate_proj(hidden), part.up_proj(hidden)))
    return output


def gated(gates: Tensor, ups: Tensor) -> Tensor:
    """silu(gates) times ups, of one shape."""
    is_plain = gates.dtype == ups.dtype != torch.float64 and not torch.compiler.is_compiling()
    if not is_plain or not has_kernels(gates.device):
        return F.silu(gates) * ups
    product: Tensor = _Gate.apply(gates, ups)
    return product


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, ups: Tensor) -> Tensor:
        gates, ups = gates.contiguous(), ups.contiguous()
        ctx.save_for_backward(gates, ups)
        return product_of(gates, ups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gates, ups = ctx.saved_tensors
        return gradients_of(grads[0].contiguous(), gates, ups)


def product_of(gates: Tensor, ups: Tensor) -> Tensor:
    """silu(gates) times ups, both contiguous."""
    out, count = torch.empty_like(gates), gates.numel()
    if count:
        _gate[(triton.cdiv(count, _NUMBERS),)](gates, ups, out, count, NUMBERS=_NUMBERS, num_warps=4)
    return out


def gradients_of(grad: Tensor, gates: Tensor, ups: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients by gates and by ups."""
    grad_gates, grad_ups, count = torch.empty_like(gates), torch.empty_like(ups), gates.numel()
    if count:
        _gate_back[(triton.cdiv(count, _NUMBERS),)](
            grad, gates, ups, grad_gates, grad_ups, count, NUMBERS=_NUMBERS, num_warps=4
        )
    return grad_gates, grad_ups


@jit
def _gate(gates, ups, out, count, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    g = tl.load(gates + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(ups + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=at < count)


@jit
def _gate_back(grad, gates, ups, grad_gates, grad_ups, count, NUMBERS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    d = tl.load(grad + at, mask=at < count, other=0.0).to(tl.float32)
    g = tl.load(gates + at, mask=at < count, other=0.0).to(tl.float32)
    u = tl.load(ups + at, mask=at < count, other=0.0).to(tl.float32)
    share = tl.sigmoid(g)
    by_gate = d * u * share * (1.0 + g * (1.0 - share))
    tl.store(grad_gates + at, by_gate.to(grad_gates.dtype.element_ty), mask=at < count)
    tl.store(grad_ups + at, (d * g * share).to(grad_ups.dtype.element_ty), mask=at < count)
