"""Experts in the precision of computation.

Products of all experts at once (`grouped_mm`) take no part in torch's autocast: with float32 weights they would be
products in float32 in one process, one after the other on CUDA, and in half precision over ranks whose sharding casts
the weights. On an accelerator weights are rounded under autocast, as those of linear layers are. Weights that are held
in half precision are widened where there is no autocast.

In one process on a CPU experts stay in float32: a pass reads those that its tokens chose, and rounding all of them
takes longer than the products of a few hundred tokens. So do experts with a side that is no multiple of 16 bytes in
half precision, which `grouped_mm` refuses.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from strop.engines.moe.layers import moe_layers

_ALIGNED = 8
"""Numbers of half precision in 16 bytes."""


def use_compute_precision(module: nn.Module, device: torch.device) -> None:
    """Have the experts of a model multiply in the precision of autocast, or in that of their input where there is none;
    those that stay in float32 are widened if they were read in half precision.

    Args:
        module: a model of transformers.
        device: that computes.
    """
    for layer in moe_layers(module):
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


class _Cast:
    """Experts with their weights in another dtype, as their forward pass asks for them."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.to(self._dtype)
