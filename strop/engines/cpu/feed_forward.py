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
from torch.overrides import _get_current_function_mode  # no public name says it

from strop.engines.cpu.library import are_plain, product_library
from strop.engines.cpu_products import MIN_NUMBERS, LayerProducts, trains_in_c

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
    """Weights of a gated part that products.c multiplies; None where one has a bias, a hook, or a layer around it.

    Args:
        part: with layers gate_proj, up_proj and down_proj.
        kinds: of the weights, beside plain tensors and parameters.
    """
    layers: tuple[Any, ...] = (part.gate_proj, part.up_proj, part.down_proj)
    if not all(_is_bare(layer) and _is_taken(layer.weight, kinds) for layer in layers):
        return None
    gate, up, down = (layer.weight for layer in layers)
    return gate, up, down


def _is_bare(layer: Any) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    has_bias = getattr(layer, "bias", None) is not None
    is_changed = has_bias or "forward" in vars(layer) or any(getattr(layer, name) for name in hooks)
    return type(layer) is nn.Linear and not is_changed


def _is_taken(weight: Tensor, kinds: tuple[type[Tensor], ...]) -> bool:
    is_plain = type(weight) in (Tensor, nn.Parameter, *kinds) and weight.device.type == "cpu"
    is_large = weight.dtype == torch.float32 and weight.numel() >= MIN_NUMBERS and weight.is_contiguous()
    return is_plain and is_large and trains_in_c(weight)


def feed_forward(part: Any, hidden: Tensor) -> Tensor | None:
    """Result [..., D] of a gated part of hidden states [..., D]; None where its layers are to be called one by one."""
    mode = _get_current_function_mode()  # type: ignore[no-untyped-call]
    is_entered = type(mode) is LayerProducts  # nobody else wants to see a product
    is_plain = hidden.dtype == torch.float32 and hidden.numel() and not torch.is_autocast_enabled("cpu")
    weights = weights_in_c(part) if is_entered and is_plain and are_plain(hidden) else None
    if weights is None:
        return None
    if not torch.is_grad_enabled():
        return _forward(hidden.contiguous(), weights, None, None)
    result: Tensor = _FeedForward.apply(hidden, *weights)  # type: ignore[no-untyped-call]
    return result


def _forward(hidden: Tensor, weights: Weights, gates: Tensor | None, ups: Tensor | None) -> Tensor:
    out = torch.empty_like(hidden)
    _run("feed_forward", hidden, weights, gates=gates, ups=ups, out=out)
    return out


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        gates, ups = (torch.empty(*hidden.shape[:-1], len(gate)) for _ in range(2))
        ctx.save_for_backward(hidden, gate, up, down, gates, ups)
        return _forward(hidden, (gate, up, down), gates, ups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, gate, up, down, gates, ups = ctx.saved_tensors
        found = [
            torch.empty_like(tensor) if needs else None
            for tensor, needs in zip((hidden, gate, up, down), ctx.needs_input_grad, strict=True)
        ]
        names = ("grad_hidden", "grad_gate", "grad_up", "grad_down")
        others = dict(zip(names, found, strict=True), gates=gates, ups=ups, grad=grads[0].contiguous())
        _run("feed_forward_back", hidden, (gate, up, down), **others)
        return tuple(found)


def _run(name: str, hidden: Tensor, weights: Weights, **others: Tensor | None) -> None:
    library, (gate, up, down) = product_library(), weights
    assert library is not None, "asked only where there is one"
    inner, dim = gate.shape
    tensors = {"hidden": hidden, "gate": gate, "up": up, "down": down, **others}
    addresses = {key: None if tensor is None else tensor.data_ptr() for key, tensor in tensors.items()}
    part = _Part(**addresses, tokens=hidden.numel() // dim, dim=dim, inner=inner)
    if getattr(library, name)(ctypes.byref(part), torch.get_num_threads()):
        raise MemoryError("no memory for the inner states of a feed-forward part")
