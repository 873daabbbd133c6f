"""A gated feed-forward part in one function in C, forward and backward: down(silu(gate(x)) up(x)).

Of the states between its products, which are several times as wide as those that go in and come out, the two that the
backward pass needs are kept, and what comes of them never leaves the cache. Every product is that of cpu_products.py,
to the last bit. Last measured: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook  # no public name says it
from torch.overrides import _get_current_function_mode  # nor this

from strop.engines.cpu.library import are_plain, product_library
from strop.engines.cpu_products import MIN_NUMBERS, LayerProducts, is_compiled, linear

Weights = tuple[Tensor, Tensor, Tensor]
"""Gate and up [I, D], down [D, I]."""


class _Part(ctypes.Structure):
    """`struct part` of products.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "hidden", "gate", "up", "down", "gates", "ups", "out", "grad", "grad_hidden", "grad_gate", "grad_up",
            "grad_down",
        )),
        *((name, ctypes.c_int64) for name in ("tokens", "dim", "inner")),
    )  # fmt: skip


def weights_in_c(part: Any, *kinds: type[Tensor]) -> Weights | None:
    """Weights of a gated part that products.c multiplies; None where one has a bias, a hook, a layer around it, or
    sizes of its own.

    Args:
        part: with layers gate_proj, up_proj and down_proj.
        kinds: of the weights, beside plain tensors and parameters.
    """
    layers: tuple[Any, ...] = (part.gate_proj, part.up_proj, part.down_proj)
    if not all(_is_bare(layer) and _is_taken(layer.weight, kinds) for layer in layers):
        return None
    gate, up, down = (layer.weight for layer in layers)
    fits = gate.shape == up.shape == down.shape[::-1]
    return (gate, up, down) if fits else None


def _is_bare(layer: Any) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    has_bias = getattr(layer, "bias", None) is not None
    is_changed = has_bias or "forward" in vars(layer) or any(getattr(layer, name) for name in hooks)
    return type(layer) is nn.Linear and not is_changed


def _is_taken(weight: Tensor, kinds: tuple[type[Tensor], ...]) -> bool:
    is_plain = type(weight) in (Tensor, nn.Parameter, *kinds) and weight.device.type == "cpu"
    is_large = weight.dtype == torch.float32 and weight.numel() >= MIN_NUMBERS and weight.is_contiguous()
    return is_plain and is_large and is_compiled(weight)


def feed_forward(part: Any, hidden: Tensor) -> Tensor | None:
    """Result [..., D] of a gated part of hidden states [..., D]; None where its layers are to be called one by one."""
    mode = _get_current_function_mode()  # type: ignore[no-untyped-call]
    has_hooks = _has_any_global_hook()  # type: ignore[no-untyped-call]
    is_taken = type(mode) is LayerProducts and mode.product is linear
    is_unseen = is_taken and not has_hooks  # nobody else looks at a product
    is_plain = hidden.dtype == torch.float32 and hidden.numel() and not torch.is_autocast_enabled("cpu")
    weights = weights_in_c(part) if is_unseen and is_plain and are_plain(hidden) else None
    if weights is None or hidden.shape[-1] != weights[0].shape[1]:
        return None
    if not torch.is_grad_enabled():
        return _forward(hidden.contiguous(), weights, None, None)
    result: Tensor = _FeedForward.apply(hidden, *weights)  # type: ignore[no-untyped-call]
    return result


def _forward(hidden: Tensor, weights: Weights, gates: Tensor | None, ups: Tensor | None) -> Tensor:
    out = torch.empty_like(hidden)
    tokens = hidden.numel() // hidden.shape[-1]
    _run("feed_forward", tokens, weights, hidden=hidden, gates=gates, ups=ups, out=out)
    return out


class _FeedForward(torch.autograd.Function):
    """Hidden states are kept for the gradients of gate and up alone."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        gates, ups = (torch.empty(*hidden.shape[:-1], len(gate)) for _ in range(2))
        kept = hidden if any(ctx.needs_input_grad[1:3]) else None
        ctx.save_for_backward(kept, gate, up, down, gates, ups)
        return _forward(hidden, (gate, up, down), gates, ups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gate, up, down, gates, ups = ctx.saved_tensors
        grad = grads[0].contiguous()  # of the shape of the hidden states
        made = [
            torch.empty_like(tensor) if needs else None
            for tensor, needs in zip((grad, gate, up, down), ctx.needs_input_grad, strict=True)
        ]
        names = ("grad_hidden", "grad_gate", "grad_up", "grad_down")
        others = dict(zip(names, made, strict=True), hidden=hidden, gates=gates, ups=ups, grad=grad)
        _run("feed_forward_back", gates.numel() // len(gate), (gate, up, down), **others)
        return tuple(made)


def _run(name: str, tokens: int, weights: Weights, **others: Tensor | None) -> None:
    library, (gate, up, down) = product_library(), weights
    assert library is not None, "asked only where there is one"
    inner, dim = gate.shape
    tensors = {"gate": gate, "up": up, "down": down, **others}
    addresses = {key: None if tensor is None else tensor.data_ptr() for key, tensor in tensors.items()}
    part = _Part(**addresses, tokens=tokens, dim=dim, inner=inner)
    if getattr(library, name)(ctypes.byref(part), torch.get_num_threads()):
        raise MemoryError("no memory for the inner states of a feed-forward part")
