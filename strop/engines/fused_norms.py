"""Root-mean-square norms in one kernel on a CUDA device.

Models of transformers write them as six operations, each a kernel of its own: four norms a layer are then a third of
the kernels of a decode step. torch.nn.functional.rms_norm is one, forward and backward.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def use_fused_norms(module: nn.Module) -> int:
    """Let the plain norms of a model compute by the fused kernel; how many do.

    A norm of another kind (Gemma's adds 1 to its weight) gives other numbers in a trial, and stays as it is.
    """
    norms = [part for part in module.modules() if is_plain_norm(part)]
    for part in norms:
        part.forward = MethodType(_fused, part)
    return len(norms)


def _fused(norm: Any, hidden: Tensor) -> Tensor:
    """hidden [..., D] / sqrt(mean(hidden^2) + eps) times the weight [D]."""
    weight, eps = norm.weight, norm_eps(norm)
    if hidden.dtype == weight.dtype:
        return F.rms_norm(hidden, weight.shape, weight, eps)
    wide = torch.promote_types(hidden.dtype, weight.dtype)
    return F.rms_norm(hidden.to(wide), weight.shape, weight.to(wide), eps)


def norm_eps(norm: Any) -> float:
    """The number that is added to the mean of squares."""
    return float(getattr(norm, "variance_epsilon", None) or norm.eps)


@torch.no_grad()
def is_plain_norm(part: nn.Module) -> bool:
    """True for a root-mean-square norm whose numbers, in a trial, are those of the fused kernel."""
    if not type(part).__name__.endswith("RMSNorm") or "forward" in vars(part):
        return False
    weight = getattr(part, "weight", None)
    eps = getattr(part, "variance_epsilon", None) or getattr(part, "eps", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(eps, float) or not eps:
        return False
    steps = torch.arange(2 * len(weight), dtype=weight.dtype, device=weight.device)
    hidden = torch.sin(steps).view(2, -1)
    output: Tensor = part(hidden)
    return torch.allclose(output.float(), _fused(part, hidden).float(), rtol=1e-4, atol=1e-5)
