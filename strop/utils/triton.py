"""Triton, where this build of torch brings it: GPU kernels are written in it, and elsewhere torch computes the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for a CPU
    triton = tl = None

if TYPE_CHECKING:
    import torch

__all__ = ["has_kernels", "jit", "tl", "triton"]

jit: Any = (lambda function: function) if triton is None else triton.jit
"""Makes a kernel of a function; what it is without Triton is never called."""


def has_kernels(device: torch.device) -> bool:
    """True if kernels can be compiled for this device."""
    return triton is not None and device.type == "cuda"
