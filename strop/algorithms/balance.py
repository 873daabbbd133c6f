"""Partitions of near-equal load, so that ranks finish together."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

LINEAR_COST = 24_576
"""Cost of one token beside its attention: 6 times a hidden size of 4096, in the units of L^2."""


def sequence_workload(num_tokens: int) -> int:
    """Relative cost of one sequence: linear layers plus attention, LINEAR_COST * L + L^2."""
    return LINEAR_COST * num_tokens + num_tokens**2


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Indices 0..n-1 in `k_partitions` parts of near-equal sums, by the largest differencing method.

    Every index appears once. The sums differ by at most the longest length, if sizes are free. With
    `equal_size` the sizes differ by at most one. A cap on the tokens of a part is no promise of this
    function: parts of ceil(total / cap) often exceed it. Memory bounds belong to the engines' packing.

    Args:
        seqlen_list: loads, at least 0: lengths, or `sequence_workload` of lengths.
        k_partitions: number of parts, between 1 and n.
        equal_size: spread the number of indices evenly too.

    Returns:
        Parts sorted by their first index, each sorted.

    Raises:
        ValueError: fewer sequences than parts, or a negative load.

    Source: Karmarkar and Karp 1982, "The differencing method of set partitioning".
    """
    if not 1 <= k_partitions <= len(seqlen_list):
        raise ValueError(
            f"{len(seqlen_list)} sequences cannot fill {k_partitions} partitions: ask for between 1 and the "
            f"number of sequences"
        )
    if min(seqlen_list) < 0:
        raise ValueError(f"a sequence has length {min(seqlen_list)}: lengths are at least 0")
    order = sorted(range(len(seqlen_list)), key=lambda index: (seqlen_list[index], index))
    width = k_partitions if equal_size else 1
    # Singles, or groups of k that spread over all parts; the remainder is the lightest group.
    cuts = [0, *range(len(order) % width or width, len(order) + 1, width)]
    heap: list[tuple[int, int, _Split]] = []
    for number, (start, end) in enumerate(pairwise(cuts)):
        split = _Split.of(order[start:end], seqlen_list, k_partitions)
        heapq.heappush(heap, (-split.spread, number, split))
    for number in range(len(heap), 2 * len(heap) - 1):
        joined = heapq.heappop(heap)[2].join(heapq.heappop(heap)[2])
        heapq.heappush(heap, (-joined.spread, number, joined))
    parts = [sorted(indices) for _, indices in heap[0][2].parts]
    return sorted(parts, key=lambda part: part[0])


@dataclass(frozen=True)
class _Split:
    """Parts of some of the sequences, heaviest first."""

    parts: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def of(cls, indices: Sequence[int], loads: Sequence[int], num_parts: int) -> _Split:
        """Each index in a part of its own; the other parts are empty."""
        single = [(loads[index], (index,)) for index in indices]
        empty: list[tuple[int, tuple[int, ...]]] = [(0, ())] * (num_parts - len(indices))
        return cls(tuple(sorted(single + empty, key=_by_load)))

    @property
    def spread(self) -> int:
        return self.parts[0][0] - self.parts[-1][0]

    def join(self, other: _Split) -> _Split:
        """The heaviest part of one with the lightest of the other, and so on."""
        pairs = zip(self.parts, reversed(other.parts), strict=True)
        return _Split(tuple(sorted(((a[0] + b[0], a[1] + b[1]) for a, b in pairs), key=_by_load)))


def _by_load(part: tuple[int, tuple[int, ...]]) -> tuple[int, int, tuple[int, ...]]:
    # Among equal loads, empty parts come last: they are filled first, so none stays empty.
    return -part[0], -len(part[1]), part[1]
