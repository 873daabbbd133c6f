"""Memory that is too short for large micro-batches: allocations that really fail, in passes above so many tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from strop.engines.causal_lm import CausalLM

TOO_MANY_BYTES = 1 << 55
"""More than a process can address."""


class _Allocation(torch.autograd.Function):
    """The identity, for which there is no memory in one of the two directions."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, where: str) -> Tensor:
        ctx.where = where
        if where == "forward":
            torch.empty(TOO_MANY_BYTES, dtype=torch.uint8)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if ctx.where == "backward":
            torch.empty(TOO_MANY_BYTES, dtype=torch.uint8)
        return grads[0], None


def set_limit(patch: pytest.MonkeyPatch, model: CausalLM, most_tokens: int, where: str) -> list[int]:
    """Let passes of a model over more packed tokens fail; the tokens of those that did."""
    whole, failed = model.backbone, list[int]()

    def backbone(*args: Any, **kwargs: Any) -> Tensor:
        hidden = whole(*args, **kwargs)
        if len(hidden) <= most_tokens or (where == "backward" and not torch.is_grad_enabled()):
            return hidden
        failed.append(len(hidden))
        short: Tensor = _Allocation.apply(hidden, where)  # type: ignore[no-untyped-call]
        return short

    patch.setattr(model, "backbone", backbone)
    return failed


def fail_once(patch: pytest.MonkeyPatch, model: CausalLM, nth: int) -> list[bool]:
    """Let the pass of this number fail, counted from 0, in its backward pass where it has one: whether each has."""
    whole, has_gradient = model.backbone, list[bool]()

    def backbone(*args: Any, **kwargs: Any) -> Tensor:
        hidden = whole(*args, **kwargs)
        has_gradient.append(torch.is_grad_enabled())
        if len(has_gradient) != nth + 1:
            return hidden
        short: Tensor = _Allocation.apply(hidden, "backward" if has_gradient[-1] else "forward")  # type: ignore[no-untyped-call]
        return short

    patch.setattr(model, "backbone", backbone)
    return has_gradient
