"""Layers that carry a state from token to token, beside those that attend, as states.py has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from strop.engines.attention_form import AttentionContext
from strop.engines.segments import Segment

ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
"""Names in transformers of layers that attend."""
States: TypeAlias = tuple[tuple[Tensor, ...], ...]
"""Of one sequence: what each such layer has kept behind the last token; empty without such layers."""


class PieceContext(AttentionContext, Protocol):
    """Attention over pieces of sequences, of which each goes on from a state and leaves one."""

    def states(self, piece: int) -> States:
        """States behind a piece."""


class SlotStates(Protocol):
    """The states of running sequences, each in a slot."""

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""

    def write(self, slots: Sequence[int], states: States) -> None:
        """Put what a sequence begins with into each of these slots."""

    def move(self, source: int, target: int) -> None:
        """Copy the states of one slot to another."""

    def free(self) -> None:
        """Give the memory back."""

    def decoding(self, attention: AttentionContext) -> AttentionContext:
        """Attention of one token of each of the first slots, whose states go on."""


class Recurrence(Protocol):
    """The layers of one model that carry a state."""

    @property
    def num_layers(self) -> int:
        """Number of layers."""

    def packed(self, attention: AttentionContext) -> AttentionContext:
        """A context of packed rows, which is asked for these layers too."""

    def prefilling(
        self, attention: AttentionContext, segments: Sequence[Segment], before: Sequence[States]
    ) -> PieceContext:
        """The same of pieces of sequences, with the states that each goes on from."""

    def slots(self, capacity: int) -> SlotStates:
        """Room for the states of so many running sequences."""
