"""Root-mean-square norms in one kernel on a CUDA device.

Models of transformers write them as six operations, each a kernel of its own: four norms a layer are then a third of
the kernels of a decode step. By a kernel of Triton (norm_kernels.py) they are one, forward and backward, whatever they
read and give; torch.nn.functional.rms_norm takes its place where that is not for the tensors.

Inside decoder layers, what reads a norm of the residual stream is products: under autocast it gives their precision,
where each of them would round its output anew, to the same numbers. Norms of heads, of outputs and the last one, which
read other precisions or are read by others than products, stay as wide as they were.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.engines import norm_kernels
from strop.utils.triton import has_kernels


def use_fused_norms(module: nn.Module) -> int:
    """Let the plain norms of a model compute by the fused kernel; how many do.

    A norm of another kind (Gemma's adds 1 to its weight) gives other numbers in a trial, and stays as it is.
    """
    norms = [part for part in module.modules() if is_plain_norm(part)]
    of_layers = norms_of_layers(module)
    for part in norms:
        part.forward = MethodType(_of_layer if id(part) in of_layers else _fused, part)
    return len(norms)


def norms_of_layers(module: nn.Module) -> set[int]:
    """The `id` of each part of the layers of a model, norms among them."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return {id(part) for layers in lists for part in layers.modules()}


def _of_layer(norm: Any, hidden: Tensor) -> Tensor:
    return _fused(norm, hidden, dtype=precision_of_layer(norm, hidden))


def precision_of_layer(norm: Any, hidden: Tensor) -> torch.dtype:
    """Of the output of a layer's norm: that of the products that read it, where `hidden` is the residual stream."""
    kind, wide = hidden.device.type, torch.promote_types(hidden.dtype, norm.weight.dtype)
    is_stream = hidden.dtype == torch.float32 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_stream else wide


def _fused(norm: Any, hidden: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """hidden [..., D] / sqrt(mean(hidden^2) + eps) times the weight [D]; in the wider precision of both, or in another
    one."""
    weight, eps = norm.weight, norm_eps(norm)
    wide = torch.promote_types(hidden.dtype, weight.dtype)
    if _has_kernel(hidden, weight):
        return norm_kernels.norm(hidden, weight, eps, dtype or wide)
    return F.rms_norm(hidden.to(wide), weight.shape, weight.to(wide), eps).to(dtype or wide)


def _has_kernel(hidden: Tensor, weight: Tensor) -> bool:
    is_plain = not isinstance(weight, DTensor) and torch.float64 not in (hidden.dtype, weight.dtype)
    fits = len(weight) <= norm_kernels.MAX_DIM and not torch.compiler.is_compiling()
    return is_plain and fits and has_kernels(hidden.device)


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
