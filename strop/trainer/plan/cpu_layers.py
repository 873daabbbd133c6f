"""Compiled layers of a CPU as a trace sees them: the same tensors are made and kept, and nothing is computed.

They take no tensors without numbers, so what they keep (engines/cpu) is written down here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from strop.engines.attention import PackedAttention
from strop.engines.attention_form import AttentionForm
from strop.engines.cpu.attention import MAX_GROUP_LANES
from strop.engines.cpu.feed_forward import weights_in_c
from strop.engines.cpu.library import update_library
from strop.engines.cpu_products import is_compiled_faster
from strop.trainer.plan.accelerator import GateKernel, NormKernel, use_traced_gates, use_traced_norms
from strop.trainer.plan.tracing import Recorder, Work


def use_traced_cpu_layers(
    module: nn.Module, dtype: torch.dtype, recorder: Recorder, *, has_layer_products: bool
) -> None:
    """Let the plain norms and gates of a model, whose parameters have no numbers yet, keep what those of
    `use_cpu_layers` keep.

    Args:
        module: without an adapter yet.
        dtype: of the computation.
        recorder: of the trace.
        has_layer_products: layers of float32 multiply by engines/cpu_products.py.
    """
    use_traced_norms(module, _norm_forward)
    is_whole = has_layer_products and dtype == torch.float32
    if is_whole:
        is_compiled_faster()  # by a measurement, which needs numbers
    use_traced_gates(module, partial(_whole_forward, recorder=recorder) if is_whole else _gate_forward)


def _norm_forward(norm: Any, hidden: Tensor) -> Tensor:
    if update_library(hidden.dtype) is None or update_library(norm.weight.dtype) is None:
        output: Tensor = type(norm).forward(norm, hidden)
        return output.to(hidden.dtype)
    normed: Tensor = NormKernel.apply(hidden, norm.weight.float(), hidden.dtype)  # type: ignore[no-untyped-call]
    return normed


class CpuAttention:
    """`PackedAttention` where its plan for a CPU takes part."""

    def __init__(self, packed: PackedAttention, recorder: Recorder) -> None:
        self._packed, self._recorder = packed, recorder
        self._pairs = float(sum(s.length * (s.num_keys - (s.length - 1) / 2) for s in packed.segments))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """As of `PackedAttention`."""
        if torch.is_autocast_enabled("cpu"):
            half = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(half), key.to(half), value.to(half)
        library = update_library(query.dtype)
        lanes = 0 if library is None or not form.is_fused or form.chunk is not None else library.lanes()
        is_whole = lanes and not query.shape[2] % lanes and not value.shape[2] % lanes
        if not is_whole or query.shape[1] // key.shape[1] > MAX_GROUP_LANES * lanes:
            return self._packed.attend(layer, query, key, value, form)
        output: Tensor = _Attend.apply(query, key, value, self._pairs, self._recorder)  # type: ignore[no-untyped-call]
        return output


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, pairs: float, recorder: Recorder
    ) -> Tensor:
        count, heads, dim = query.shape
        out, sums = query.new_empty(count, heads, value.shape[2]), torch.empty(count, heads)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.flops, ctx.recorder = 2.0 * heads * (dim + value.shape[2]) * pairs, recorder
        recorder.work += Work(attention_flops=ctx.flops, num_calls=1)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        ctx.recorder.work += Work(attention_flops=2.5 * ctx.flops, num_calls=1)
        sums = torch.zeros(key.shape), torch.zeros(value.shape)
        return torch.empty_like(query), sums[0].to(key.dtype), sums[1].to(value.dtype), None, None


def _gate_forward(part: Any, hidden: Tensor) -> Tensor:
    gates, ups = part.gate_proj(hidden), part.up_proj(hidden)
    is_compiled = update_library(gates.dtype) is not None
    gated = GateKernel.apply(gates, ups) if is_compiled else F.silu(gates) * ups  # type: ignore[no-untyped-call]
    output: Tensor = part.down_proj(gated)
    return output


def _whole_forward(part: Any, hidden: Tensor, *, recorder: Recorder) -> Tensor:
    weights = weights_in_c(part, FakeTensor)
    if weights is None:
        return _gate_forward(part, hidden)
    if not torch.is_grad_enabled():  # no state is kept
        recorder.work += _product_of(hidden, weights[0]) * 3
        return torch.empty_like(hidden)
    output: Tensor = _FeedForward.apply(hidden, *weights, recorder)  # type: ignore[no-untyped-call]
    return output


class _FeedForward(torch.autograd.Function):
    """Inner states of a few hundred tokens, which both passes hold at a time, are left out."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, gate: Tensor, up: Tensor, down: Tensor, recorder: Recorder
    ) -> Tensor:
        states = [hidden.new_empty(*hidden.shape[:-1], len(gate)) for _ in range(2)]
        kept = hidden if any(ctx.needs_input_grad[1:3]) else None
        ctx.save_for_backward(kept, gate, up, down, *states)
        ctx.recorder, ctx.product = recorder, _product_of(hidden, gate)
        recorder.work += ctx.product * 3
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, *of_weights = needs = ctx.needs_input_grad[:4]
        ctx.recorder.work += ctx.product * (1 + 2 * of_hidden + sum(of_weights))
        inputs = zip((grads[0], *ctx.saved_tensors[1:4]), needs, strict=True)
        return (*(torch.empty_like(tensor) if is_needed else None for tensor, is_needed in inputs), None)


def _product_of(hidden: Tensor, weight: Tensor) -> Work:
    """Of one of the three; inner states stay in the cache."""
    num_bytes = 4.0 * (hidden.numel() + weight.numel())
    return Work(product_flops=2.0 * hidden.numel() * len(weight), weight_bytes=num_bytes, num_calls=1)
