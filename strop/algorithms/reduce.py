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


@dataclass(frozen=True, kw_only=True)
class ExplainedVariance:
    """How much of the variance of returns the values explain: 1 - var(errors) / var(returns).

    Parts merge exactly: a part carries its count, its means and its sums of squares around them.
    """

    count: int = 0
    """Tokens."""
    return_mean: float = 0.0
    return_squares: float = 0.0
    """Sum of squared distances of the returns from their mean."""
    error_mean: float = 0.0
    """Mean of return minus value."""
    error_squares: float = 0.0
    """Sum of squared distances of the errors from their mean."""

    def merge(self, other: ExplainedVariance) -> ExplainedVariance:
        """That over the tokens of both.

        Source: Chan, Golub and LeVeque 1979, updating formulae for sample variances.
        """
        count = self.count + other.count
        if not count:
            return self
        share = other.count / count
        return_gap, error_gap = other.return_mean - self.return_mean, other.error_mean - self.error_mean
        return ExplainedVariance(
            count=count,
            return_mean=self.return_mean + return_gap * share,
            return_squares=self.return_squares + other.return_squares + return_gap**2 * self.count * share,
            error_mean=self.error_mean + error_gap * share,
            error_squares=self.error_squares + other.error_squares + error_gap**2 * self.count * share,
        )

    @property
    def value(self) -> float:
        """1 - var(errors) / var(returns), or NaN where the returns do not vary."""
        return 1 - self.error_squares / self.return_squares if self.return_squares > 0 else math.nan


Reduction: TypeAlias = Mean | Max | Min | ExplainedVariance


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
    """The final number under each key; a mean over nothing, or the share of a variance of 0, is left out."""
    return {key: item.value for key, item in metrics.items() if not _is_over_nothing(item)}


def _is_over_nothing(item: Reduction) -> bool:
    match item:
        case Mean(count=0):
            return True
        case ExplainedVariance(return_squares=0.0):
            return True
    return False


def _merge(key: str, left: Reduction, right: Reduction) -> Reduction:
    match left, right:
        case (Mean(), Mean()):
            return left.merge(right)
        case (Max(), Max()):
            return left.merge(right)
        case (Min(), Min()):
            return left.merge(right)
        case (ExplainedVariance(), ExplainedVariance()):
            return left.merge(right)
    raise ValueError(
        f"metric {key!r} is reported as {type(left).__name__} by one part and as {type(right).__name__} by "
        f"another: report it with one rule"
    )


def _any_nan(*values: float) -> bool:
    return any(math.isnan(value) for value in values)
