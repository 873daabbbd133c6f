"""States of the running sequences in layers that carry one (linear attention).

Sequence i of the batch owns row i of every tensor, as it owns slot i of the cache of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strop.engines.recurrent import LayerState

States = tuple[tuple[Tensor, Tensor], ...]
"""Of one sequence: of each such layer the last inputs of its convolution [1, C, K], and its matrices [1, H, Dk, Dv]."""
GROW_SHARE = 1.5
"""Tables grow at least by this factor, so that copies stay rare."""


def num_bytes(states: States) -> int:
    """Memory of the states of one sequence."""
    return sum(part.nbytes for pair in states for part in pair)


class SlotStates:
    """The states of all slots, layer by layer."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tables: list[tuple[Tensor, Tensor]] = []

    def write(self, slots: Sequence[int], states: States) -> None:
        """Put what a sequence begins with into each of these slots."""
        if not states:
            return
        if not self._tables:
            self._tables = [(a.new_zeros(0, *a.shape[1:]), b.new_zeros(0, *b.shape[1:])) for a, b in states]
        self._grow(max(slots) + 1)
        for tables, pair in zip(self._tables, states, strict=True):
            for table, part in zip(tables, pair, strict=True):
                table[slots[0] : slots[-1] + 1] = part

    def move(self, source: int, target: int) -> None:
        """Copy the states of one slot to another."""
        for tables in self._tables:
            for table in tables:
                table[target] = table[source]

    def layer(self, number: int, num_slots: int) -> LayerState:
        """The states of the first slots in one layer, which are written to."""
        convolution, matrix = self._tables[number]
        return LayerState(convolution[:num_slots], matrix[:num_slots])

    def free(self) -> None:
        """Give the memory back."""
        self._tables = []

    @property
    def num_bytes(self) -> int:
        """Memory of all tables."""
        return sum(table.nbytes for tables in self._tables for table in tables)

    def _grow(self, num_slots: int) -> None:
        have = len(self._tables[0][0])
        if num_slots <= have:
            return
        size = min(self._capacity, max(num_slots, int(GROW_SHARE * have)))
        self._tables = [
            tuple(torch.cat([table, table.new_zeros(size - have, *table.shape[1:])]) for table in tables)  # type: ignore[misc]
            for tables in self._tables
        ]
