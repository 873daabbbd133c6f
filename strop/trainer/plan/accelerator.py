"""Kernels of an accelerator as a trace sees them: the same tensors are made and kept, and nothing is computed.

A machine without the accelerator has no such kernels, and `FakeTensorMode` no tensors on it, so the memory of
FlashAttention (engines/varlen.py), of norms and gates in one kernel (engines/norm_kernels.py, engines/gate_kernels.py)
and of the chunks of the head (engines/head.py) is written down here, operation for operation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from strop.engines.attention import PackedAttention
from strop.engines.attention_form import AttentionForm
from strop.engines.fused_norms import is_plain_norm, norms_before_products, precision_of_products
from strop.engines.head import chunk_rows
from strop.engines.plain_gates import is_plain_gate
from strop.engines.varlen import MAX_HEAD_DIM
from strop.trainer.plan.tracing import Recorder, Work


class FlashAttention:
    """`VarlenPlan` of packed segments; of forms that it has not, the memory-efficient kernel, without the padding of
    its buckets."""

    def __init__(self, packed: PackedAttention, dtype: torch.dtype, recorder: Recorder) -> None:
        self._packed, self._dtype, self._recorder = packed, dtype, recorder
        self._num_gathered = sum(segment.num_keys for segment in packed.segments)
        self._gathers = any(segment.num_keys > segment.length for segment in packed.segments)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """As of `PackedAttention`."""
        if not form.is_fused:
            with _disable_current_modes():  # what its calls are follows from numbers
                self._packed.prepare()
            return self._packed.attend(layer, query, key, value, form)
        dim = query.shape[2]
        is_half = self._dtype in (torch.bfloat16, torch.float16)
        is_flash = is_half and form.chunk is None and value.shape[2] == dim <= MAX_HEAD_DIM and dim % 8 == 0
        if is_flash:
            query, key, value = (part.to(self._dtype) for part in (query, key, value))
        if self._gathers or not is_flash:  # buckets copy all that they see
            key, value = self._gathered(key, value)
        if not is_flash:  # the kernel that takes a mask has no heads that share keys
            shared = query.shape[1] // key.shape[1]
            key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
        out: Tensor = _Flash.apply(query, key, value, self._pairs, self._recorder)  # type: ignore[no-untyped-call]
        return out

    def _gathered(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that each segment sees, one behind the other."""
        (heads, dim), value_dim = key.shape[1:], value.shape[2]
        both = torch.cat([key.flatten(1), value.flatten(1)], dim=1)
        index = torch.zeros(self._num_gathered, dtype=torch.int64)
        rows = nn.functional.embedding(index, both)
        keys, values = torch.split(rows, [heads * dim, heads * value_dim], dim=1)
        return keys.view(-1, heads, dim), values.view(-1, heads, value_dim)

    @property
    def _pairs(self) -> float:
        """Pairs of a query and a key that it sees."""
        return float(
            sum(
                segment.length * (segment.num_keys - (segment.length - 1) / 2)
                for segment in self._packed.segments
            )
        )


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, pairs: float, recorder: Recorder
    ) -> Tensor:
        out = torch.empty(*query.shape[:2], value.shape[2], dtype=query.dtype)
        sums = torch.empty(query.shape[:2], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.flops, ctx.recorder = 2.0 * query.shape[1] * (query.shape[2] + value.shape[2]) * pairs, recorder
        recorder.work += Work(attention_flops=ctx.flops, num_calls=1)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        _wide = torch.empty(
            query.shape, dtype=torch.float32
        )  # the kernel adds gradients of queries in float32
        ctx.recorder.work += Work(attention_flops=2.5 * ctx.flops, num_calls=1)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


NormForward = Callable[[Any, Tensor], Tensor]
"""Function of a norm and hidden states."""


def use_traced_norms(
    module: nn.Module, forward: NormForward, before_products: NormForward | None = None
) -> None:
    """Let the plain norms of a model compute by a function; those that only products read by another one."""
    chosen = norms_before_products(module)
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 1:
            continue
        twin = copy.copy(part)
        twin._parameters = {"weight": nn.Parameter(torch.ones(len(weight)))}
        if is_plain_norm(twin):
            part.forward = MethodType((before_products or forward) if id(part) in chosen else forward, part)


def fused_norm(norm: Any, hidden: Tensor) -> Tensor:
    """By the kernel, in the wider precision of hidden states and weight."""
    return _normed(norm, hidden, torch.promote_types(hidden.dtype, norm.weight.dtype))


def fused_norm_before_products(norm: Any, hidden: Tensor) -> Tensor:
    """The same where only products read it."""
    return _normed(norm, hidden, precision_of_products(norm, hidden))


def _normed(norm: Any, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    out: Tensor = NormKernel.apply(hidden, norm.weight, dtype)  # type: ignore[no-untyped-call]
    return out


class NormKernel(torch.autograd.Function):
    """A norm in one kernel, of hidden states [..., D] and its weight [D]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        scale = torch.empty(*hidden.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, scale)
        return hidden.to(dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, _ = ctx.saved_tensors
        return hidden.clone(), torch.empty_like(weight), None


def use_traced_gates(module: nn.Module, forward: Callable[[Any, Tensor], Tensor]) -> None:
    """Let the plain gated feed-forward parts of a model compute by a function of part and hidden states."""
    with torch.no_grad():
        for part in module.modules():
            if is_plain_gate(part):
                part.forward = MethodType(forward, part)


def fused_gate(part: Any, hidden: Tensor) -> Tensor:
    """A feed-forward part with its gate in one kernel."""
    gates, ups = part.gate_proj(hidden), part.up_proj(hidden)
    output: Tensor = part.down_proj(GateKernel.apply(gates, ups))  # type: ignore[no-untyped-call]
    return output


class GateKernel(torch.autograd.Function):
    """silu(gates) times ups in one kernel."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, ups: Tensor) -> Tensor:
        ctx.save_for_backward(gates, ups)
        return torch.empty_like(gates)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gates, ups = ctx.saved_tensors
        return torch.empty_like(gates), torch.empty_like(ups)


class DeviceHead(torch.autograd.Function):
    """Log-probs of the tokens that hidden states [M, D] predict, in chunks: `Head` on a device with its kernels."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, recorder: Recorder) -> Tensor:
        half = weight.to(torch.bfloat16)
        logits = _chunk_of_logits(hidden, weight)
        del logits, half
        ctx.save_for_backward(hidden, weight)
        ctx.recorder, ctx.product = recorder, _product_work(hidden, weight)
        recorder.work += ctx.product
        return torch.empty(len(hidden), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        hidden, weight = ctx.saved_tensors
        half = weight.to(torch.bfloat16)
        grad_hidden = torch.empty_like(hidden)
        trains = ctx.needs_input_grad[1]
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32) if trains else None
        logits = _chunk_of_logits(hidden, weight)
        grad = torch.empty_like(logits, dtype=half.dtype)
        del logits, grad, half
        ctx.recorder.work += ctx.product * (3.0 if trains else 2.0)  # logits again, and a gradient or two
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None


def _chunk_of_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    rows = min(len(hidden), chunk_rows(len(weight), torch.device("cuda")))
    return torch.empty(rows, len(weight), dtype=torch.float32)


def _product_work(hidden: Tensor, weight: Tensor) -> Work:
    """Of logits; the kernels beside it read and write them once."""
    num_logits = float(len(hidden) * len(weight))
    return Work(product_flops=2.0 * num_logits * hidden.shape[1], moved_bytes=8.0 * num_logits, num_calls=4)
