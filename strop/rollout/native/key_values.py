"""The keys and values that an engine holds: contract of a cache, and of what a request may begin with.

There are two caches. On a CPU each sequence has a slot as long as the longest one (cache.py): the compiled kernels read
a sequence's tokens one after another, and room that nothing was written to takes no memory there. An accelerator's
memory is taken as a whole, so there a sequence has pages (paged_cache.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from strop.engines.attention_form import AttentionForm
from strop.rollout.native.request import Request


class Computed(Protocol):
    """Keys and values of the first tokens of a sequence, which stay as long as somebody has this."""

    @property
    def num_tokens(self) -> int:
        """P."""

    @property
    def nbytes(self) -> int:
        """Memory of them."""

    def read(self) -> Tensor:
        """[2, L, Hkv, P, D]."""

    def first(self, num_tokens: int) -> Computed:
        """Fewer of them, in the same memory."""

    def kept(self) -> Computed:
        """The same, whatever happens to the sequence that they were computed for."""


class Entrant(NamedTuple):
    """A request that is to run."""

    request: Request
    num_computed: int
    """Of its given tokens, those whose keys and values are in the cache."""


class KeyValueCache(Protocol):
    """Keys and values of the running sequences, in slots 0..B-1, and of what requests begin with."""

    state_bytes: int
    """Memory that a sequence takes elsewhere, however many tokens it has."""
    free_bytes: int | None
    """Memory that is free on every rank that holds a part of the heads; None: what this process finds free."""
    agreed: Callable[[int], int]
    """The smallest of the numbers that these ranks call it with at one time, so that all of them grow alike."""
    reclaim: Callable[[bool], bool]
    """Gives up something that only later requests could use, with True also where they are seen to use it; False where
    there is nothing."""
    holds_computed: bool
    """True where what requests begin with lies in it, not beside it."""

    def expect(self, requests: Sequence[Request]) -> None:
        """All these are in sight, and may get as long as they may: there is room early, if there is memory for it."""

    def num_fitting(self, entrants: Sequence[Entrant], lengths: NDArray[np.int64]) -> int:
        """Number of these, from the first on, for which there is room beside running sequences of these lengths, with a
        token more for each. Before anything was put in, all.

        Where room is short, this reclaims what later requests could use, at last also what these were to begin with:
        then `put` finds no room, and the next call counts without it.
        """

    def put(self, key_values: Tensor, *, before: Computed | None, state_bytes: int) -> Computed | None:
        """Take keys and values [2, L, Hkv, N, D] of tokens behind `before`: all of them together, or None where there
        is no room."""

    def reading(self, computed: Sequence[Computed]) -> Callable[[int], Tensor]:
        """Function that gives keys and values [2, P, Hkv, D] of a layer, those of each of these behind the others'."""

    def enter(self, slots: range, computed: Computed, *, longest: int) -> int:
        """Begin sequences with the same tokens in these slots, the next ones; the number for which there was room.

        Args:
            slots: one for each.
            computed: what `put` gave.
            longest: tokens of the longest running sequence.
        """

    def reserve(self, lengths: NDArray[np.int64]) -> bool:
        """Make room for one more token of every running sequence, and be ready to attend; False where memory is
        short."""

    def computed(self, slot: int, num_tokens: int) -> Computed:
        """The first tokens of a slot, until something else is done with it, unless they are `kept`."""

    def release(self, slot: int) -> None:
        """Its sequence has ended."""

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """A sequence of so many tokens goes on in another slot, which was released."""

    def free(self) -> None:
        """Give the memory back; nothing in it is used again."""

    @property
    def num_bytes(self) -> int:
        """Memory of what was used at one time so far."""

    @property
    def running_bytes(self) -> int:
        """The same of running sequences; what several of them share is counted for each."""

    @property
    def held_bytes(self) -> int:
        """Memory of all, used or not."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, form: AttentionForm,
        *, num_tokens: int,
    ) -> Tensor | None:  # fmt: skip
        """As DecodeAttention.attend by a compiled kernel; None where there is none for such a layer."""

    def append(self, layer: int, slots: Tensor, lengths: Tensor, key: Tensor, value: Tensor) -> None:
        """Put one token behind those of each slot: key [B, Hkv, D] and value [B, Hkv, Dv]."""

    def layer(self, layer: int, num_slots: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hkv, T, D] of one layer, T at least `num_tokens`."""


def no_room(num_tokens: int) -> MemoryError:
    """The error of a batch that cannot hold one sequence."""
    return MemoryError(
        f"there is no memory for the keys and values of one sequence of {num_tokens} tokens: "
        f"lower data.max_response_tokens or data.max_prompt_tokens, or give the process more memory"
    )
