"""Norms, routers and experts in the precision of the model (model.dtype=float64)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strop.engines.moe.layers import moe_layers

EACH = "eager"
"""Name in transformers of the way in which experts compute one after the other."""


class _InFloat64(TorchFunctionMode):
    """float64 where float32 is asked for by name. Norms of transformers do, whatever the model has, which rounds a
    difference of 1e-16 between two layouts of the same tokens up to one of 1e-8; so do routers, for their logits or
    their softmax."""

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
    for parameter in module.parameters():
        parameter.data = parameter.data.double()  # some families keep those of routers in float32
    parts: list[Any] = [part for part in module.modules() if _is_norm(part)]
    parts += [layer.router for layer in moe_layers(module) if layer.router is not None]
    for part in parts:
        part.forward = partial(_exact_pass, part.forward)
    module.set_experts_implementation(EACH)  # the joint product of all experts has no float64


def _is_norm(part: nn.Module) -> bool:
    """A norm as a family writes it; those of torch compute in the precision of their input."""
    return "Norm" in type(part).__name__ and not type(part).__module__.startswith("torch.")
