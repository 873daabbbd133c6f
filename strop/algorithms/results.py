"""Results of users' functions, described for errors."""

from __future__ import annotations

from torch import Tensor


def describe(value: object) -> str:
    """Type and shapes of a result, for an error."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(describe(part) for part in value)})"
    return "None" if value is None else f"a {type(value).__name__}"
