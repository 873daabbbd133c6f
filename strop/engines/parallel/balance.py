"""Load balancing over data-parallel ranks: partitions of rows of near-equal load, so that ranks finish together."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

LINEAR_COST = 24_576
"""Cost of one token beside its attention: 6 times a hidden size of 4096, in the units of L^2."""

UNBALANCE = 1.05
"""Largest load, beside that of rows distributed one by one, at which rows of one prompt stay together: what
they share computed twice costs about as much as a few percent of waiting."""
MAX_HALVINGS = 6
"""Number of times that heavy groups are cut again before all rows are distributed one by one."""


def sequence_workload(num_tokens: int) -> int:
    """Relative cost of one sequence: linear layers plus attention, LINEAR_COST * L + L^2."""
    return LINEAR_COST * num_tokens + num_tokens**2


def balanced_rows(
    num_tokens: Sequence[int], num_shared: Sequence[int], groups: Sequence[Hashable], parts: int
) -> list[list[int]]:
    """`balance_parts` of rows of so many tokens, of which the first ones are computed with the row before, where both
    are in one part."""
    workloads, saved = ([sequence_workload(count) for count in counts] for counts in (num_tokens, num_shared))
    return balance_parts(workloads, groups, parts, saved)


def balance_parts(
    workloads: Sequence[int], groups: Sequence[Hashable], parts: int, saved: Sequence[int] | None = None
) -> list[list[int]]:
    """Row numbers 0..n-1 in `parts` parts of near-equal load: which rows each data-parallel rank gets.

    Rows of one group (the samples of a prompt; what they begin with alike is then computed once) stay in one part as
    long as the largest load is at most UNBALANCE times that of rows distributed one by one. Otherwise heavy groups
    are cut in two, in four, and so on until it is. Rows that save a load behind the row before, such as the turns of an
    episode, are cut from it last, and in one place.

    Args:
        workloads: load of each row by itself, at least 0, such as `sequence_workload` of its tokens.
        groups: the group of each row.
        parts: number of parts; those above the number of rows stay empty.
        saved: load that each row has less in one part with the row before; None: none.

    Returns:
        Each row once; parts ordered by their first row, rows ascending, empty parts last.

    Raises:
        ValueError: another number of groups than of rows, no part, or a negative load.
    """
    if len(groups) != len(workloads):
        raise ValueError(f"{len(workloads)} rows have {len(groups)} groups; pass the group of each row")
    if parts < 1:
        raise ValueError(f"rows cannot go into {parts} parts; use at least 1")
    loads = _Loads(workloads, [0] * len(workloads) if saved is None else saved)
    rows: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    one_by_one = [[[row] for row in range(len(workloads))], loads.runs(range(len(workloads)))]
    best = min((_distribute(units, loads, parts) for units in one_by_one), key=loads.largest)
    limit = UNBALANCE * loads.largest(best)
    units = list(rows.values())
    heavy = (
        sum(map(loads.of, units)) / parts / 4
    )  # a part is filled evenly by several units, not by one or two
    for _ in range(MAX_HALVINGS):
        distributed = _distribute(units, loads, parts)
        if loads.largest(distributed) <= limit:
            return distributed
        units = [piece for unit in units for piece in _halves(unit, loads, heavy)]
        heavy /= 2
    return best


@dataclass(frozen=True)
class _Loads:
    """Loads of rows that are in one part."""

    workloads: Sequence[int]
    saved: Sequence[int]

    def of(self, rows: Sequence[int]) -> int:
        """Load of rows in ascending order."""
        behind = (row for before, row in itertools.pairwise(rows) if row == before + 1)
        return sum(self.workloads[row] for row in rows) - sum(self.saved[row] for row in behind)

    def largest(self, parts: Sequence[Sequence[int]]) -> int:
        """Load of the part with the largest one."""
        return max(map(self.of, parts))

    def runs(self, rows: Iterable[int]) -> list[list[int]]:
        """Rows in ascending order, cut where a row saves nothing behind the one before."""
        runs: list[list[int]] = []
        for row in rows:
            if runs and self.saved[row] and runs[-1][-1] == row - 1:
                runs[-1].append(row)
            else:
                runs.append([row])
        return runs


def _distribute(units: Sequence[list[int]], loads: _Loads, parts: int) -> list[list[int]]:
    """Rows in parts, units whole."""
    filled = min(parts, len(units))
    if not filled:
        return [[] for _ in range(parts)]
    chosen = get_seqlen_balanced_partitions([loads.of(unit) for unit in units], filled)
    together = [sorted(row for unit in part for row in units[unit]) for part in chosen]
    return [*sorted(together, key=lambda part: part[0]), *([] for _ in range(parts - filled))]


def _halves(unit: list[int], loads: _Loads, heavy: float) -> list[list[int]]:
    """Two near-equal halves of a unit above `heavy`; of a single run, rows up to a place and those behind it."""
    if len(unit) == 1 or loads.of(unit) <= heavy:
        return [unit]
    runs = loads.runs(unit)
    if len(runs) == 1:
        cuts = ([unit[:place], unit[place:]] for place in range(1, len(unit)))
        return min(cuts, key=loads.largest)
    halves = get_seqlen_balanced_partitions([loads.of(run) for run in runs], 2)
    return [sorted(row for number in half for row in runs[number]) for half in halves]


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int) -> list[list[int]]:
    """Indices 0..n-1 in `k_partitions` parts of near-equal sums, by the largest differencing method.

    Every index appears once. The sums differ by at most the longest length. A cap on the tokens of a part is
    no promise of this function: parts of ceil(total / cap) often exceed it. Memory bounds belong to the engines'
    packing.

    Args:
        seqlen_list: loads, at least 0: lengths, or `sequence_workload` of lengths.
        k_partitions: number of parts, between 1 and n.

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
    heap: list[tuple[int, int, _Split]] = []
    for number, index in enumerate(order):
        split = _Split.of(index, seqlen_list[index], k_partitions)
        heapq.heappush(heap, (-split.imbalance, number, split))
    for number in range(len(heap), 2 * len(heap) - 1):
        joined = heapq.heappop(heap)[2].join(heapq.heappop(heap)[2])
        heapq.heappush(heap, (-joined.imbalance, number, joined))
    parts = [sorted(indices) for _, indices in heap[0][2].parts]
    return sorted(parts, key=lambda part: part[0])


@dataclass(frozen=True)
class _Split:
    """Parts of some of the sequences, heaviest first."""

    parts: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def of(cls, index: int, load: int, num_parts: int) -> _Split:
        """One sequence in the first part; the others are empty."""
        return cls(((load, (index,)), *[(0, ())] * (num_parts - 1)))

    @property
    def imbalance(self) -> int:
        return self.parts[0][0] - self.parts[-1][0]

    def join(self, other: _Split) -> _Split:
        """The heaviest part of one with the lightest of the other, and so on."""
        pairs = zip(self.parts, reversed(other.parts), strict=True)
        return _Split(tuple(sorted(((a[0] + b[0], a[1] + b[1]) for a, b in pairs), key=_by_load)))


def _by_load(part: tuple[int, tuple[int, ...]]) -> tuple[int, int, tuple[int, ...]]:
    # Among equal loads, empty parts come last: they are filled first, so none stays empty.
    return -part[0], -len(part[1]), part[1]
