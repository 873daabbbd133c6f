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

    @property
    def token_bytes(self) -> int:
        """Bytes of the choices for a token."""
        return 2 * self.num_layers * self.num_chosen

    def with_bytes(self, following: bytes) -> RoutedExperts:
        """Choices with those for the tokens behind.

        Raises:
            ValueError: these bytes are not those of whole tokens.
        """
        size = self.token_bytes
        if len(following) % size:
            raise ValueError(f"{len(following)} bytes are no tokens of {size} bytes")
        tokens = (following[start : start + size] for start in range(0, len(following), size))
        return replace(self, tokens=(*self.tokens, *tokens))

    def first(self, count: int) -> RoutedExperts:
        """Choices for the first `count` tokens."""
        return self if count >= len(self.tokens) else replace(self, tokens=self.tokens[:count])
