"""Tokens between the ranks of a tensor-parallel group: all-gather and reduce-scatter, each the gradient of the other.

Concurrency: collectives of the group, forward and backward; every rank calls them in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_tokens(hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[T n, D] of all ranks' tokens [n, D]; the backward pass adds up what the ranks say about each."""
    gathered: Tensor = _GatherTokens.apply(hidden, group)  # type: ignore[no-untyped-call]
    return gathered


def scatter_tokens(hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's [n, D] of the ranks' [T n, D], added up; the backward pass gives each the gradient of all tokens."""
    scattered: Tensor = _ScatterTokens.apply(hidden, group)  # type: ignore[no-untyped-call]
    return scattered


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(hidden, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _reduce_scatter(grads[0], ctx.group), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(hidden, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_gather(grads[0], ctx.group), None


def _all_gather(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = rows.new_empty((dist.get_world_size(group) * len(rows), *rows.shape[1:]))
    dist.all_gather(list(gathered.chunk(dist.get_world_size(group))), rows.contiguous(), group=group)
    return gathered


def _reduce_scatter(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    scattered = rows.new_empty((len(rows) // dist.get_world_size(group), *rows.shape[1:]))
    dist.reduce_scatter(scattered, list(rows.contiguous().chunk(dist.get_world_size(group))), group=group)
    return scattered
