"""Experts in the precision of computation.

Products of all experts at once (`grouped_mm`) take no part in torch's autocast: with float32 weights they would be
products in float32 in one process, one after the other on CUDA, and in half precision over ranks whose sharding casts
the weights. Here weights are rounded under autocast, as those of linear layers are. Weights that are held in half
precision are widened where there is no autocast.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strop.engines.moe.layers import moe_layers


def use_compute_precision(module: nn.Module) -> None:
    """Have the experts of a model multiply in the precision of autocast, or in that of their input where there is none;
    a model of transformers."""
    for layer in moe_layers(module):
        layer.experts.forward = partial(_forward, layer.experts)


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
