"""Heap of a process on a CPU in a pass through all layers, from the trace of a pass through few (passes.py): what a
layer takes and gives back is replayed for each layer of its kind, and what is beside the layers once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from strop.trainer.plan.heap import Heap

Events = Sequence[tuple[int, int]]
"""Number of a storage, and its bytes; 0 where it is given back."""
BESIDE = -1
"""In place of a layer's number: a storage that none of them makes."""
THROUGH = -1
"""In place of a storage's number: a layer and those behind it are through, and hold nothing more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HeapTrace:
    """Storages of a forward and a backward pass through some layers."""

    events: Events
    kinds: tuple[Hashable, ...]
    """Of the layers."""
    forward: tuple[range, ...]
    """Events of each of them."""
    backward: tuple[range, ...]
    largest: int
    """As of `Heap`."""


def share_in_heap(events: Events, largest: int) -> float:
    """Of the bytes that are there after these events, those in the heap."""
    held: dict[int, int] = {}
    for number, num_bytes in events:
        if num_bytes:
            held[number] = num_bytes
        else:
            held.pop(number, None)
    return sum(size for size in held.values() if size < largest) / max(1, sum(held.values()))


@lru_cache(maxsize=512)
def gap_bytes(trace: HeapTrace, kinds: tuple[Hashable, ...]) -> int:
    """Bytes by which a process is larger, at its most, than its tensors at theirs, in passes through layers of these
    kinds."""
    process = _Process(trace.largest)
    for layer, number, num_bytes in _replayed(trace, kinds):
        if number == THROUGH:
            process.drop(layer)
        elif num_bytes:
            process.take(layer, number, num_bytes)
        else:
            process.give_back(layer, number)
    return max(0, process.most - process.most_used)


def _replayed(trace: HeapTrace, kinds: Sequence[Hashable]) -> Iterator[tuple[int, int, int]]:
    """Layer that makes a storage, number of it, and its bytes."""
    of_kind = {kind: number for number, kind in enumerate(trace.kinds)}
    # The input of the first layer may need no gradient, so that it is traced beside others of its kind.
    order = [trace.kinds.index(kinds[0]), *(of_kind[kind] for kind in kinds[1:])]
    forward, backward = trace.forward, trace.backward
    maker = {
        trace.events[i][0]: number
        for ranges in (forward, backward)
        for number, events in enumerate(ranges)
        for i in events
        if trace.events[i][1]
    }

    def part(events: range, layer: int, traced: int) -> Iterator[tuple[int, int, int]]:
        for number, num_bytes in (trace.events[i] for i in events):
            made_by = maker.get(number, BESIDE)
            yield (BESIDE if made_by == BESIDE else layer + made_by - traced), number, num_bytes

    last, last_traced = len(order) - 1, len(forward) - 1
    yield from part(range(forward[0].start), 0, 0)
    for layer, traced in enumerate(order):
        yield from part(forward[traced], layer, traced)
    yield from part(range(forward[-1].stop, backward[-1].start), last, last_traced)
    for layer in range(last, -1, -1):
        yield from part(backward[order[layer]], layer, order[layer])
        yield layer + 1, THROUGH, 0
    yield from part(range(backward[0].stop, len(trace.events)), 0, 0)


class _Process:
    """Storages in the heap and beside it."""

    def __init__(self, largest: int) -> None:
        self._heap = Heap(largest)
        self._held: dict[int, dict[int, tuple[int | None, int]]] = defaultdict(dict)
        """Start in the heap, and bytes, by layer and number."""
        self._mapped = self._used = 0
        self.most = self.most_used = 0
        """Bytes of the heap and of what is beside it; of the storages alone."""

    def take(self, layer: int, number: int, num_bytes: int) -> None:
        start = self._heap.take(num_bytes)
        self._held[layer][number] = start, num_bytes
        self._used += num_bytes
        if start is None:
            self._mapped += num_bytes
        self.most = max(self.most, self._heap.top + self._mapped)
        self.most_used = max(self.most_used, self._used)

    def give_back(self, layer: int, number: int) -> None:
        """Nothing of one that a layer of another kind has given back, or has not made."""
        start, num_bytes = self._held[layer].pop(number, (None, 0))
        self._used -= num_bytes
        if start is None:
            self._mapped -= num_bytes
        else:
            self._heap.give_back(start)

    def drop(self, layer: int) -> None:
        """Give back what the layer and those behind it hold."""
        for other in [other for other in self._held if other >= layer]:
            for number in list(self._held[other]):
                self.give_back(other, number)
            del self._held[other]
