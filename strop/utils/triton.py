"""Triton, where this build of torch brings it: GPU kernels are written in it, and elsewhere torch computes the same.

Triton builds a module of Python when a kernel is first launched, and another one for each kernel, which it keeps in the
user's cache: without a C compiler or Python's headers, which small containers lack, it launches no new one.
"""

from __future__ import annotations

import functools
import logging
import subprocess
from typing import TYPE_CHECKING, Any

try:
    import triton
    import triton.language as tl
except ImportError:  # builds of torch for a CPU
    triton = tl = None

if TYPE_CHECKING:
    import torch

__all__ = ["KernelError", "has_kernels", "jit", "jit_of_any", "tl", "triton"]

logger = logging.getLogger(__name__)

KernelError: type[Exception] = RuntimeError if triton is None else triton.TritonError
"""Triton's errors: a kernel cannot be compiled, or asks for more than a device has."""

jit: Any = (lambda function: function) if triton is None else triton.jit
"""Makes a kernel of a function; what it is without Triton is never called."""


def jit_of_any(*names: str) -> Any:
    """As `jit`, with one kernel for all values of these arguments. Triton makes three of an integer, for 1, for
    multiples of 16 and for others, each of which takes a second or two when it first comes: too long for numbers that
    change from step to step."""
    return jit if triton is None else triton.jit(do_not_specialize=names)


def has_kernels(device: torch.device) -> bool:
    """True if kernels can be compiled for this device, and launched."""
    return triton is not None and device.type == "cuda" and _launches()


@functools.cache
def _launches() -> bool:
    """Triton finds the driver of the device, and could build its module."""
    try:
        triton.runtime.driver.active.get_current_target()
    except (RuntimeError, OSError, ImportError, AssertionError, subprocess.CalledProcessError) as error:
        logger.warning(
            "Triton cannot launch kernels on this machine, and torch's slower operations take their place (%s: %s); "
            "install gcc and the headers of Python (python3-dev)",
            type(error).__name__,
            error,
        )
        return False
    return True
