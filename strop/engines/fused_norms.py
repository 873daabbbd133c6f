"""Root-mean-square norms in one kernel on a CUDA device.

Models of transformers write them as six operations, each a kernel of its own: four norms a layer are then a third of
the kernels of a decode step. By a kernel of Triton (norm_kernels.py) they are one, forward and backward, whatever they
read and give; torch.nn.functional.rms_norm takes its place where that is not for the tensors.

Two norms of a usual layer are read by products alone, that before its attention and that before its dense feed-forward
part: under autocast they give the precision of products, where each product would round the output anew, to the same
numbers. Their gradients are then added up in that precision over the products (three of attention, two of a
feed-forward part), no longer in float32. All other norms stay as wide as they were: routers compute in float32, and
outputs of attention and experts are added to the residual stream.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.engines import norm_kernels
from strop.engines.plain_gates import is_plain_gate
from strop.utils.triton import has_kernels

_BEFORE_FEED_FORWARD = ("pre_mlp_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm")
"""Names of the norm before a feed-forward part, in the order of looking: where one of the first two is there, the last
is a norm of what attention gives."""
_NORMED_STREAM = "MiniMaxDecoderLayer"
"""A layer whose residual stream is the output of its norms."""


def use_fused_norms(module: nn.Module) -> int:
    """Let the plain norms of a model compute by the fused kernel; how many do.

    A norm of another kind (Gemma's adds 1 to its weight) gives other numbers in a trial, and stays as it is.
    """
    norms = [part for part in module.modules() if is_plain_norm(part)]
    before_products = norms_before_products(module)
    for part in norms:
        part.forward = MethodType(_before_products if id(part) in before_products else _fused, part)
    return len(norms)


def norms_before_products(module: nn.Module) -> set[int]:
    """The `id` of each norm of a model whose output nothing but products reads, by the names and classes in its layers.

    Such a layer has `input_layernorm`, `self_attn` of linear layers and norms alone, another norm before its
    feed-forward part, and no further part that could read one of them. That other norm counts where the part is dense.
    """
    chosen = set()
    for layer in module.modules():
        parts = dict(layer.named_children())
        second = next((parts[name] for name in _BEFORE_FEED_FORWARD if name in parts), None)
        attention: Any = parts.pop("self_attn", None)
        others = [part for part in parts.values() if not _is_norm(part) and _has_weights(part)]
        is_usual = attention is not None and "input_layernorm" in parts and len(others) == 1
        if second is None or not is_usual or type(layer).__name__ == _NORMED_STREAM:
            continue
        if all(
            type(part) is nn.Linear or _is_norm(part) for part in attention.children() if _has_weights(part)
        ):
            chosen.add(id(parts["input_layernorm"]))
        if is_plain_gate(others[0]):
            chosen.add(id(second))
    return chosen


def _is_norm(part: nn.Module) -> bool:
    return type(part).__name__.endswith(("RMSNorm", "LayerNorm"))


def _has_weights(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None


def _before_products(norm: Any, hidden: Tensor) -> Tensor:
    return _fused(norm, hidden, dtype=precision_of_products(norm, hidden))


def precision_of_products(norm: Any, hidden: Tensor) -> torch.dtype:
    """Of the output of a norm that only products read: theirs, where autocast rounds what they read."""
    kind, wide = hidden.device.type, torch.promote_types(hidden.dtype, norm.weight.dtype)
    is_rounded = wide == torch.float32 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_rounded else wide


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
