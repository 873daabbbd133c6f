"""The heap of glibc's allocator."""

from __future__ import annotations

import ctypes
import os

LARGEST_HEAP_BYTES = 32 << 20
"""A larger piece (DEFAULT_MMAP_THRESHOLD_MAX) comes from the system, which has it back at once; a smaller one lies in
the heap, where freed memory stays with the process."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt (malloc.h)."""


def keep_heap() -> None:
    """Freed memory of the heap stays with this process until it ends.

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
        mallopt(_MMAP_THRESHOLD, LARGEST_HEAP_BYTES)
        mallopt(_TRIM_THRESHOLD, -1)
