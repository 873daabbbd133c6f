"""Norms, routers and experts in the precision of the model (model.dtype=float64)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strop.engines.moe.layers import moe_layers

EACH = "eager"
"""Name in transformers of the way in which experts compute one after the other."""


class _ExactNorm(nn.Module):
    """RMS norm in the precision of its input.

    Those of transformers compute in float32 whatever the model has, which rounds a difference of 1e-16 between two
    layouts of the same tokens up to one of 1e-8.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden * weight / sqrt(mean(hidden^2) + eps) over the last axis."""
        return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps)


class _InFloat64(TorchFunctionMode):
    """float64 where float32 is asked for by name; routers of transformers do, for their logits or their softmax."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        exact = {torch.float32: torch.float64}
        args = tuple(exact.get(value, value) if isinstance(value, torch.dtype) else value for value in args)
        kwargs = {
            name: exact.get(value, value) if isinstance(value, torch.dtype) else value
            for name, value in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


def _exact_pass(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _InFloat64():
        return forward(*args, **kwargs)


def use_exact(module: Any) -> None:
    """Have norms, routers and experts compute in float64; a model of transformers."""
    use_exact_norms(module)
    for parameter in module.parameters():
        parameter.data = parameter.data.double()  # some families keep those of routers in float32
    for layer in moe_layers(module):
        if layer.router is not None:
            router: Any = layer.router
            router.forward = partial(_exact_pass, router.forward)
    module.set_experts_implementation(EACH)  # the joint product of all experts has no float64


def use_exact_norms(module: nn.Module) -> None:
    """Replace the norms of the Llama family, told by their `variance_epsilon`; the weights keep their names.

    Norms with a gate beside their input stay.
    """
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if hasattr(child, "variance_epsilon") and len(inspect.signature(child.forward).parameters) == 1:
                norm: Any = child
                setattr(parent, name, _ExactNorm(norm.weight, norm.variance_epsilon))
