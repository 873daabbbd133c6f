"""Feed-forward parts of a layer that are dense, with a gate: down(silu(gate(x)) up(x)), and nothing else."""

from __future__ import annotations

import copy
import functools
import inspect
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def is_plain_gate(part: nn.Module) -> bool:
    """True for a feed-forward part that, in a trial with small matrices, gives down(silu(gate(x)) up(x)).

    It takes the hidden states alone, and nothing that is learned or kept is in it but in these three.
    """
    names = ("gate_proj", "up_proj", "down_proj")
    if not type(part).__name__.endswith("MLP") or "forward" in vars(part):
        return False
    if not all(type(getattr(part, name, None)) is nn.Linear for name in names):
        return False
    held = chain(part.named_parameters(), part.named_buffers())
    if any(name.split(".")[0] not in names for name, _ in held):
        return False
    if len(inspect.signature(part.forward).parameters) != 1:
        return False
    trial: Any = copy.copy(part)
    gate, up, down = small = _small_layers()
    trial._modules = {**part._modules, **dict(zip(names, small, strict=True))}
    hidden = torch.cos(torch.arange(6, dtype=torch.float32)).view(2, 3)
    try:
        output: Tensor = trial(hidden)
    except (RuntimeError, ValueError, TypeError, AttributeError):  # it computes something else with its sizes
        return False
    return torch.allclose(output, down(F.silu(gate(hidden)) * up(hidden)), atol=1e-6)


@functools.cache
def _small_layers() -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    """The layers of a trial, in host memory: not to be asked for first within a mode that makes other tensors."""
    sizes = ((3, 4), (3, 4), (4, 3))
    small = [nn.Linear(*size, device="meta", dtype=torch.float32).to_empty(device="cpu") for size in sizes]
    for number, linear in enumerate(small):
        for parameter in linear.parameters():  # nothing is drawn
            angles = torch.arange(parameter.numel(), dtype=torch.float32) + number
            parameter.copy_(torch.sin(angles).view_as(parameter))
    gate, up, down = small
    return gate, up, down
