"""Heap of a process on a CPU, as glibc's allocator hands it out (sourceware.org/bugzilla, 14581).

An aligned tensor is looked for with 112 bytes more than it has. What is left of them behind it goes to a small object:
the header of this or another tensor's storage (96 bytes), edges of the graph (8 to 24). Such an object, or its place in
the cache of the thread, stands between the tensor and its neighbour when both are free, and keeps the two from becoming
one hole. So a tensor fits into the place of another of its size only where one of that one's neighbours is free too and
nothing stands between them, and the holes that a pass leaves depend on the order in which its tensors come and go.

Pieces for which the heap does not grow lie in it all the same where a hole, or what it has at its end, is large enough.

Compared with glibc 2.36. With 2.41 pieces between small objects took 146 MiB where 150 are planned.
"""

from __future__ import annotations

import bisect
import random

ALIGNMENT = 64
"""Of tensors, in bytes; the bookkeeping between two of them takes as much."""
LOOKED_FOR = 48
"""Bytes that a piece is looked for with, beside those that it takes."""
OBJECTS = 0.3
"""Share of the pieces behind which a small object stays (benchmarks/RESULTS.md, "Plans beside runs")."""


class Heap:
    """Pieces that are taken and given back: the smallest hole that is large enough, or the end."""

    def __init__(self, largest: int, *, objects: float = OBJECTS) -> None:
        """Args:
        largest: bytes below which the heap grows for a piece (strop/utils/glibc.py).
        objects: share of the pieces behind which a small object stays.
        """
        self._largest = largest
        self._objects = objects
        self._random = random.Random(0)
        self.end = 0
        """Of the last piece."""
        self.top = 0
        """Most of it: the heap does not shrink."""
        self.used = 0
        """Bytes of the pieces."""
        self._pieces: dict[int, int] = {}
        """Sizes by start."""
        self._holes: list[tuple[int, int]] = []
        """Size and start, smallest first."""
        self._starts: dict[int, int] = {}
        """Sizes of holes by their start."""
        self._ends: dict[int, int] = {}
        """Starts of holes by their end."""

    def take(self, num_bytes: int) -> int | None:
        """Start of a piece; None of one that comes from the system."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        if num_bytes == 0:
            return None
        place = bisect.bisect_left(self._holes, (size + LOOKED_FOR, 0))
        if place < len(self._holes):
            room, start = self._holes[place]
            self._fill(start)
            self._open(start + size, room - size)
        elif size + LOOKED_FOR > max(self._largest, self.top - self.end):
            return None
        else:
            start = self.end
            self.end += size
            self.top = max(self.top, self.end)
        if self._random.random() < self._objects:
            size -= ALIGNMENT  # of an object, which stays
        self._pieces[start] = size
        self.used += size
        return start

    def give_back(self, start: int) -> None:
        """End a piece; free neighbours become one hole, and what is at the end is none."""
        size = self._pieces.pop(start)
        self.used -= size
        end = start + size
        if end in self._starts:
            end += self._fill(end)
        if start in self._ends:
            before = self._ends[start]
            self._fill(before)
            start = before
        if end == self.end:
            self.end = start
        else:
            self._open(start, end - start)

    def _open(self, start: int, size: int) -> None:
        if size:
            bisect.insort(self._holes, (size, start))
            self._starts[start] = size
            self._ends[start + size] = start

    def _fill(self, start: int) -> int:
        """Size of a hole that is one no longer."""
        size = self._starts.pop(start)
        del self._ends[start + size]
        del self._holes[bisect.bisect_left(self._holes, (size, start))]
        return size
