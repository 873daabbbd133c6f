"""Norms, rotary positions and the gate of a feed-forward part, each in one pass over memory, forward and backward.

Models of transformers write them as many operations of torch, each with a tensor of its own: in an update of a small
model they take about a third as long as the products. Last measured: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import ctypes
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from strop.engines.cpu.feed_forward import feed_forward
from strop.engines.cpu.library import library_for, update_library
from strop.engines.fused_norms import is_plain_norm, norm_eps
from strop.engines.plain_gates import is_plain_gate


def use_cpu_layers(module: nn.Module) -> tuple[int, int]:
    """Let the plain norms and gated feed-forward parts of a model compute by compiled functions; how many of each do.

    Tensors that these are not for, and all where nothing can be compiled, go the way that they went before; a norm of
    bfloat16 whose weight is float32 is of bfloat16 in either case.
    """
    parts = list(module.modules())
    norms = [part for part in parts if is_plain_norm(part)]
    gates = [part for part in parts if is_plain_gate(part)]
    for part in norms:
        part.forward = MethodType(_norm_forward, part)
    for part in gates:
        part.forward = MethodType(_gate_forward, part)
    return len(norms), len(gates)


def _gate_forward(part: Any, hidden: Tensor) -> Tensor:
    output: Tensor | None = feed_forward(part, hidden)
    if output is None:
        output = part.down_proj(gated(part.gate_proj(hidden), part.up_proj(hidden)))
    return output


def gated(gates: Tensor, ups: Tensor) -> Tensor:
    """silu(gates) times ups, of one shape."""
    if library_for(gates, ups) is None:
        return F.silu(gates) * ups
    product: Tensor = _Gate.apply(gates, ups)  # type: ignore[no-untyped-call]
    return product


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, ups: Tensor) -> Tensor:
        gates, ups = gates.contiguous(), ups.contiguous()
        ctx.save_for_backward(gates, ups)
        out = torch.empty_like(gates)
        _library(gates).gate(*_at(gates, ups, out), gates.numel(), torch.get_num_threads())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gates, ups = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_gates, grad_ups = torch.empty_like(gates), torch.empty_like(ups)
        _library(gates).gate_back(
            *_at(grad, gates, ups, grad_gates, grad_ups), grad.numel(), torch.get_num_threads()
        )
        return grad_gates, grad_ups


def _norm_forward(part: Any, hidden: Tensor) -> Tensor:
    if library_for(hidden) is None or library_for(part.weight) is None:
        output: Tensor = type(part).forward(part, hidden)
        return output.to(hidden.dtype)
    normed: Tensor = _Norm.apply(hidden, part.weight, norm_eps(part))  # type: ignore[no-untyped-call]
    return normed


class _Norm(torch.autograd.Function):
    """hidden [..., D] / sqrt(mean(hidden^2) + eps) times the weight [D]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        hidden, ctx.dtype = hidden.contiguous(), weight.dtype
        weight = weight.float().contiguous()
        dim = len(weight)
        rows = hidden.numel() // dim
        out, factors = torch.empty_like(hidden), torch.empty(rows)
        _library(hidden).norm(*_at(hidden, weight, out, factors), rows, dim, eps, torch.get_num_threads())
        ctx.save_for_backward(hidden, weight, factors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, factors = ctx.saved_tensors
        grad = grads[0].contiguous()
        dim, rows = len(weight), len(factors)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty(dim)
        library = _library(hidden)
        parts = torch.empty(library.norm_parts(rows), dim)
        addresses = _at(grad, hidden, weight, factors, grad_hidden, grad_weight, parts)
        library.norm_back(*addresses, rows, dim, torch.get_num_threads())
        return grad_hidden, grad_weight.to(ctx.dtype), None


def turned(states: Tensor, cosines: Tensor, sines: Tensor, *, is_back: bool) -> Tensor:
    """The rotation of states [1, H, N, D] by the angles of their tokens [1, N, D], or its transpose; heads of a token
    lie together."""
    _, heads, count, dim = states.shape
    states = states if states.stride(3) == 1 else states.contiguous()
    cosines, sines = cosines.float().contiguous(), sines.float().contiguous()
    out = torch.empty(1, count, heads, dim, dtype=states.dtype)
    _library(states).turn(
        states.data_ptr(), states.stride(1), states.stride(2), *_at(cosines, sines, out), count, heads, dim,
        is_back, torch.get_num_threads(),
    )  # fmt: skip
    return out.transpose(1, 2)


def _library(states: Tensor) -> ctypes.CDLL:
    library = update_library(states.dtype)
    assert library is not None, "asked only where there is one"
    return library


def _at(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]
