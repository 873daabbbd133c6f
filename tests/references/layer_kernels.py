"""What the kernels of a decode step between its products compute, in operations of torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def add_and_norm(
    stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """As strop.rollout.native.layer_kernels has it."""
    if delta is not None:
        stream += delta
    wide = torch.promote_types(stream.dtype, torch.float32)
    return F.rms_norm(stream.to(wide), weight.shape, weight.to(wide), eps).to(dtype)


def turn_heads(
    states: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cosines: Tensor,
    sines: Tensor,
    num_heads: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """As strop.rollout.native.layer_kernels has it."""
    (heads, kv_heads), (count, dim) = num_heads, cosines.shape
    wide = torch.promote_types(states.dtype, torch.float32)
    query, key, value = states.view(count, -1, dim).split([heads, kv_heads, kv_heads], dim=1)

    def turned(part: Tensor, weight: Tensor | None) -> Tensor:
        part = part.to(wide)
        if weight is not None:
            part = F.rms_norm(part, weight.shape, weight.to(wide), eps)
        left, right = part.chunk(2, dim=-1)
        across = torch.cat([-right, left], dim=-1)
        return (part * cosines[:, None] + across * sines[:, None]).to(states.dtype)

    query_norm, key_norm = norms or (None, None)
    return turned(query, query_norm), turned(key, key_norm), value.contiguous()


def gate_halves(states: Tensor) -> Tensor:
    """As strop.rollout.native.layer_kernels has it."""
    gates, ups = states.to(torch.promote_types(states.dtype, torch.float32)).chunk(2, dim=-1)
    return (F.silu(gates) * ups).to(states.dtype)
