"""Several scores of one sample as one reward: the weighted sum, with every part kept under its own name.

    score = sum over the functions that apply of weight * score

A function that returned None (TRL's sign for "not applicable") is left out of the sum, and has no part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from strop.rewards.outcome import Value

JUDGING = ("acc", "pred")
"""Parts that say whether an answer is right and what it is; the first function that gives `acc` gives both."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Score of one function for a sample."""

    key: str
    """Name of the part; empty where the function is alone, whose parts keep their names."""
    weight: float = 1.0
    """Of its score in the sum."""
    score: float | None
    """None: it does not apply to this sample."""
    parts: Mapping[str, Value] = field(default_factory=dict)
    """Other entries of the returned dictionary."""
    token_rewards: Sequence[tuple[int, float]] = ()
    """As of `Outcome`, before the weight."""


def combined_token_rewards(parts: Sequence[Part]) -> list[tuple[int, float]]:
    """Token rewards of all functions, each with its weight."""
    return [(place, part.weight * reward) for part in parts for place, reward in part.token_rewards]


def combine(parts: Sequence[Part]) -> tuple[float | None, dict[str, Value]]:
    """The score of a sample and its parts; the score is None where no function applies.

    The score of a function with a key is the part `key`, what else it returned is `key/name`.
    """
    applicable = [part for part in parts if part.score is not None]
    merged: dict[str, Value] = {}
    for part in applicable:
        if not part.key:
            merged |= part.parts
            continue
        merged[part.key] = part.score if part.score is not None else math.nan
        merged |= {f"{part.key}/{name}": value for name, value in part.parts.items()}
    if "acc" not in merged:
        judging = next((part.parts for part in applicable if "acc" in part.parts), {})
        merged |= {name: judging[name] for name in JUDGING if name in judging}
    if not applicable:
        return None, {}
    return math.fsum(part.weight * (part.score or 0.0) for part in applicable), merged
