"""The heap of glibc's allocator."""

from __future__ import annotations

LARGEST_HEAP_BYTES = 32 << 20
"""A larger piece (DEFAULT_MMAP_THRESHOLD_MAX) comes from the system, which has it back at once; a smaller one lies in
the heap, where freed memory stays with the process."""
