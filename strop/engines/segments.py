"""Segments: runs of tokens in a packed row, and the runs that they continue."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Span: TypeAlias = tuple[int, int]
"""[start, end) of tokens."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of tokens in the packed row."""

    start: int
    """Index of its first token in the row."""
    length: int
    """Number of tokens."""
    prefix: tuple[Span, ...] = ()
    """Runs of the row that it continues, from the beginning of its sequence on; none where it begins one."""
    blocks: tuple[Span, ...] = ()
    """Runs of its tokens, counted from its first one, that see each other whatever their order: images of models that
    read these in both directions (Gemma 3)."""

    @cached_property
    def num_keys(self) -> int:
        """Tokens that its last token sees."""
        return sum(end - start for start, end in self.prefix) + self.length

    def keys(self) -> NDArray[np.int64]:
        """[num_keys], places of these tokens in the row, in the order of the sequence."""
        runs = (*self.prefix, (self.start, self.start + self.length))
        return np.concatenate([np.arange(start, end) for start, end in runs])


@dataclass(frozen=True)
class Places:
    """Places of the tokens of a row of N on a rank that has the queries of some, and keys and values of all; in host
    memory."""

    queries: Tensor
    """[N] int64: place among the rank's own tokens, which lie in the order of its segments; 0 of other tokens."""
    keys: Tensor
    """[N] int64: place among the keys and values."""
