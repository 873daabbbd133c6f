"""Norms and experts in the precision of the model (model.dtype=float64)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

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


def use_exact(module: Any) -> None:
    """Have norms and experts compute in float64; a model of transformers."""
    use_exact_norms(module)
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
