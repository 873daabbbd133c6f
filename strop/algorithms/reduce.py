"""Metric values that know how they merge: the rule is a type, never guessed from the key.

Micro-batches and ranks each report a mapping of such values; `merge_metrics` joins them and
`metric_values` ends with plain numbers. A mean carries its count, so unequal parts merge exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Mean:
    """A weighted mean: the weighted total and the weight (usually a count of tokens or samples)."""

    total: float
    count: float

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"a mean over {self.count} items was given; a count is at least 0")

    def merge(self, other: Mean) -> Mean:
        """The mean over the items of both."""
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        """total / count, or NaN when nothing was counted."""
        return self.total / self.count if self.count else math.nan


@dataclass(frozen=True)
class Sum:
    """A total over all parts."""

    value: float

    def merge(self, other: Sum) -> Sum:
        """The total of both."""
        return Sum(self.value + other.value)


@dataclass(frozen=True)
class Max:
    """The largest value of all parts; NaN if any part is NaN, so that it is never hidden."""

    value: float

    def merge(self, other: Max) -> Max:
        """The larger of both."""
        return Max(math.nan if _any_nan(self.value, other.value) else max(self.value, other.value))


@dataclass(frozen=True)
class Min:
    """The smallest value of all parts; NaN if any part is NaN, so that it is never hidden."""

    value: float

    def merge(self, other: Min) -> Min:
        """The smaller of both."""
        return Min(math.nan if _any_nan(self.value, other.value) else min(self.value, other.value))


Reduction: TypeAlias = Mean | Sum | Max | Min


def merge_metrics(parts: Iterable[Mapping[str, Reduction]]) -> dict[str, Reduction]:
    """One mapping from many; a key that only some parts report merges over those.

    Raises:
        ValueError: two parts report one key with different rules.
    """
    merged: dict[str, Reduction] = {}
    for part in parts:
        for key, item in part.items():
            merged[key] = _merge(key, merged[key], item) if key in merged else item
    return merged


def metric_values(metrics: Mapping[str, Reduction]) -> dict[str, float]:
    """The final number under each key; a mean over nothing is left out."""
    return {
        key: item.value for key, item in metrics.items() if not (isinstance(item, Mean) and item.count == 0)
    }


def _merge(key: str, left: Reduction, right: Reduction) -> Reduction:
    match left, right:
        case (Mean(), Mean()):
            return left.merge(right)
        case (Sum(), Sum()):
            return left.merge(right)
        case (Max(), Max()):
            return left.merge(right)
        case (Min(), Min()):
            return left.merge(right)
    raise ValueError(
        f"metric {key!r} is reported as {type(left).__name__} by one part and as {type(right).__name__} by "
        f"another: report it with one rule"
    )


def _any_nan(*values: float) -> bool:
    return any(math.isnan(value) for value in values)
