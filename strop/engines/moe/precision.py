"""Experts and routers in the precision of computation.

Products of all experts at once (`grouped_mm`) take no part in torch's autocast: with float32 weights they would be
products in float32 in one process, one after the other on CUDA, and in half precision over ranks whose sharding casts
the weights. On an accelerator weights are rounded under autocast, as those of linear layers are. Weights that are held
in half precision are widened where there is no autocast.

In one process on a CPU experts stay in float32: a pass reads those that its tokens chose, and rounding all of them
takes longer than the products of a few hundred tokens. So do experts with a side that is no multiple of 16 bytes in
half precision, which `grouped_mm` refuses.

Routers of DeepSeek, GLM-4-MoE and others multiply in float32 whatever precision their model has, since experts are
chosen by small differences; autocast would round the result. Their products are made without it, of the numbers that a
model in half precision has.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strop.engines.moe.layers import moe_layers
from strop.engines.products import PRODUCTS, matrices

_ALIGNED = 8
"""Numbers of half precision in 16 bytes."""


def use_compute_precision(module: nn.Module, device: torch.device) -> None:
    """Have the experts of a model multiply in the precision of autocast, or in that of their input where there is none;
    those that stay in float32 are widened if they were read in half precision. Routers that are written to multiply in
    float32 do so.

    Args:
        module: a model of transformers.
        device: that computes.
    """
    for layer in moe_layers(module):
        if layer.router is not None and _multiplies_wide(layer.router):
            layer.router.forward = MethodType(_route, layer.router)
        weights = list(layer.experts.parameters())
        is_aligned = not any(side % _ALIGNED for weight in weights for side in weight.shape[1:])
        if device.type != "cpu" and is_aligned:
            layer.experts.forward = MethodType(_forward, layer.experts)
            continue
        for weight in weights:
            if weight.dtype.itemsize == 2:
                weight.data = weight.data.float()


def are_rounded(part: nn.Module) -> bool:
    """True of experts that multiply in the precision of computation."""
    return getattr(vars(part).get("forward"), "__func__", None) is _forward


def _forward(experts: nn.Module, hidden: Tensor, *routing: Tensor) -> Tensor:
    """As of the experts, of hidden states [N, D]."""
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    output: Tensor = type(experts).forward(_Cast(experts, dtype), hidden, *routing)
    return output


def _route(router: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """As of the router, of hidden states [..., D]; under autocast with products in float32."""
    kind = hidden.device.type
    if not torch.is_autocast_enabled(kind):
        return type(router).forward(router, hidden, *args, **kwargs)
    half = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        return type(router).forward(_Cast(router, half, min_dim=2), hidden.to(half), *args, **kwargs)


def _multiplies_wide(router: nn.Module) -> bool:
    """True of a router with a matrix [E, D] of its own that multiplies half precision in float32."""
    weight = getattr(router, "weight", None)
    if isinstance(router, nn.Linear) or not isinstance(weight, Tensor) or weight.dim() != 2:
        return False
    forward = type(router).forward
    if len(inspect.signature(forward).parameters) != 2:  # itself and hidden states
        return False
    hidden = torch.zeros(1, weight.shape[1], dtype=torch.bfloat16, device=weight.device)
    try:
        with torch.no_grad(), _UntilProduct():
            forward(_Cast(router, torch.bfloat16, min_dim=2), hidden)
    except _ProductReached as reached:
        return reached.dtype == torch.float32
    except (ValueError, TypeError, RuntimeError, AttributeError, LookupError):
        return False  # it takes hidden states of another form, and is left as it is
    return False


class _ProductReached(Exception):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype


class _UntilProduct(TorchFunctionMode):
    """Ends a forward pass at its first product of matrices, with the precision of that."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.linear, *PRODUCTS):
            factors = matrices(args, kwargs or {})
            raise _ProductReached(factors[0].dtype)
        return func(*args, **(kwargs or {}))


class _Cast:
    """Experts, or a router, with their weights in another dtype, as their forward pass asks for them."""

    def __init__(self, part: nn.Module, dtype: torch.dtype, *, min_dim: int = 0) -> None:
        """Tensors of fewer dimensions than `min_dim` stay as they are: biases of choices decide by small numbers."""
        self._part, self._dtype, self._min_dim = part, dtype, min_dim

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < self._min_dim:
            return value
        return value.to(self._dtype)
