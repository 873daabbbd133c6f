"""A model with layers that carry a state, and the states of the running sequences of the native engine.

Sequence i of the batch owns row i of every tensor of states, as it owns slot i of the cache of keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strop.engines.attention_form import AttentionContext
from strop.engines.linear_attention.packed import (
    LINEAR,
    Context,
    LayerState,
    PackedContext,
    PieceContext,
    Run,
    States,
    attend_apart,
)
from strop.engines.segments import Segment

GROW_SHARE = 1.5
"""Tables grow at least by this factor, so that copies stay rare."""


class Recurrence:
    """The layers of one model that carry a state."""

    def __init__(self, module: Any, num_layers: int) -> None:
        """Args:
        module: the model.
        num_layers: of it that carry a state.
        """
        self.num_layers = num_layers
        kinds: Sequence[str] = module.config.get_text_config().layer_types
        attending = [layer for layer, kind in enumerate(kinds) if kind != LINEAR]
        self.numbers: Mapping[int, int] = {layer: number for number, layer in enumerate(attending)}
        """Of the layers that attend: layer of the model -> number among them."""

    def packed(self, attention: AttentionContext) -> AttentionContext:
        """A context of packed rows; those that are one already stay as they are."""
        return attention if hasattr(attention, "recur") else PackedContext(attention, self.numbers)

    def prefilling(
        self, attention: AttentionContext, segments: Sequence[Segment], before: Sequence[States]
    ) -> PieceContext:
        """The same of pieces of sequences."""
        return PieceContext(attention, self.numbers, segments, before)

    def slots(self, capacity: int) -> SlotStates:
        """Room for the states of so many running sequences."""
        return SlotStates(self.numbers, capacity)


def recurrence_of(module: Any) -> Recurrence | None:
    """The layers of a model that carry a state; None where all attend."""
    num_layers = attend_apart(module)
    return Recurrence(module, num_layers) if num_layers else None


class DecodeContext(Context):
    """One token of each of the first slots."""

    def __init__(self, attention: AttentionContext, slots: SlotStates) -> None:
        super().__init__(attention, slots.numbers)
        self._slots = slots

    def recur(self, layer: int, run: Run, hidden: Tensor) -> Tensor:
        """As `Context.recur`; the states go on."""
        return run(hidden[:, None], self._slots.layer(layer, len(hidden)))[:, 0]


class SlotStates:
    """The states of all slots, layer by layer."""

    def __init__(self, numbers: Mapping[int, int], capacity: int) -> None:
        """Args:
        numbers: of the layers that attend.
        capacity: most slots.
        """
        self.numbers, self._capacity = numbers, capacity
        self._tables: list[tuple[Tensor, ...]] = []

    def decoding(self, attention: AttentionContext) -> AttentionContext:
        """Attention of one token of each of the first slots, whose states go on."""
        return DecodeContext(attention, self)

    def write(self, slots: Sequence[int], states: States) -> None:
        """Put what a sequence begins with into each of these slots."""
        if not states:
            return
        if not self._tables:
            self._tables = [tuple(part.new_zeros(0, *part.shape[1:]) for part in parts) for parts in states]
        self._grow(max(slots) + 1)
        for tables, parts in zip(self._tables, states, strict=True):
            for table, part in zip(tables, parts, strict=True):
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
            tuple(torch.cat([table, table.new_zeros(size - have, *table.shape[1:])]) for table in tables)
            for tables in self._tables
        ]
