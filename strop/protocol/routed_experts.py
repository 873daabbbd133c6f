"""Experts that the tokens of a sequence went to, as the engine that generated chose them; without torch and numpy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

TOKEN_DTYPE = "<i2"
"""numpy's name of the numbers of `RoutedExperts.tokens`: int16, little-endian."""


@dataclass(frozen=True, kw_only=True)
class RoutedExperts:
    """Choices of the routers for the first tokens of a sequence: of all that the model read."""

    num_layers: int
    """Layers with experts."""
    num_chosen: int
    """Experts of each that a token goes to."""
    tokens: tuple[bytes, ...] = field(repr=False)
    """Of each token, `num_layers` times `num_chosen` numbers of experts, layer by layer."""

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> RoutedExperts:
        """Choices for the first `count` tokens."""
        return self if count >= len(self.tokens) else replace(self, tokens=self.tokens[:count])
