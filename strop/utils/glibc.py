"""The heap of glibc's allocator."""

from __future__ import annotations

import ctypes
import os

LARGEST_HEAP_BYTES = 32 << 20
"""A piece of this size (DEFAULT_MMAP_THRESHOLD_MAX) or more comes from the system, which has it back at once; a smaller
one lies in the heap, where freed memory stays with the process."""
RECOMPUTED_HEAP_BYTES = 1 << 20
"""The same where activations are computed again in the backward pass, which is done for memory. A tensor does not fit
into the place of another one of its size (strop/trainer/plan/heap.py), so that each layer took new memory for the same
tensors: an update with 16 layers of 384 numbers, which needs 390 MiB, had the heap grow to 1,100. It takes a quarter
longer so (benchmarks/RESULTS.md)."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt (malloc.h)."""


def largest_in_heap(*, is_recomputed: bool) -> int:
    """Bytes below which a piece lies in the heap of a process that trains.

    Args:
        is_recomputed: activations are computed again (model.gradient_checkpointing).
    """
    return RECOMPUTED_HEAP_BYTES if is_recomputed else LARGEST_HEAP_BYTES


def keep_heap(*, is_recomputed: bool) -> None:
    """Freed memory of the heap stays with this process until it ends; argument as of `largest_in_heap`.

    What lies free at the end of the heap goes back to the system otherwise, after each training step, and the next one
    has a page fault for every 4 KiB of it. Nothing happens where the environment says what the allocator is to do, and
    under another C library.
    """
    if any(
        name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Where one of them is set, glibc moves neither any more.
        mallopt(_MMAP_THRESHOLD, largest_in_heap(is_recomputed=is_recomputed))
        mallopt(_TRIM_THRESHOLD, -1)
