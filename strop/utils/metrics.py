"""Metrics: their names, declared beside the function that makes them, and values that know how they merge.

Whoever asks for a metric (health rules, docs) takes it from its declaration, so that a name cannot change in one place
alone. Micro-batches and ranks each report a mapping of values; `merge_metrics` joins them and `metric_values` ends with
plain numbers. The rule of a merge is a type, never guessed from the key, and a mean carries its count, so that unequal
parts merge exactly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

METRICS: dict[str, Metric] = {}
"""Every declared metric, by name, of the modules that are imported."""

_PLACE = re.compile(r"\{([^}]*)\}|<[^>]*>")


class Metric(str):
    """The name of a metric, or of a family of metrics.

    In the name of a family `{mean,max}` stands for one of these words and `<data source>` for any text; `of` gives its
    members.
    """

    unit: str
    over: str
    """Meaning of one number, and the items over which it is a mean, a sum, a largest or a smallest."""

    def __new__(cls, name: str, unit: str, over: str) -> Metric:
        """Declare it.

        Raises:
            ValueError: the name is declared already, as something else.
        """
        metric = super().__new__(cls, name)
        metric.unit, metric.over = unit, over
        registered = METRICS.setdefault(name, metric)
        if (registered.unit, registered.over) != (unit, over):
            raise ValueError(
                f"metric {name!r} is declared twice: {registered.over!r}, and {over!r}; take one, or another name"
            )
        return metric

    def of(self, *words: str) -> str:
        """The member with these words in its places, in order.

        Raises:
            ValueError: there are more or fewer places, or a word is not among those that its place is for.
        """
        places: list[str] = _PLACE.findall(self)
        if len(words) != len(places) or any(
            choice and word not in choice.split(",") for word, choice in zip(words, places, strict=True)
        ):
            raise ValueError(
                f"metric {str(self)!r} has no member with the words {', '.join(words) or '(none)'}"
            )
        remaining = iter(words)
        return _PLACE.sub(lambda _: next(remaining), self)

    @property
    def last(self) -> str:
        """The part behind the last slash: the name among the statistics of a loss."""
        return self.rpartition("/")[2]

    def __reduce__(self) -> tuple[Any, ...]:
        """As a plain text: other processes have declarations of their own."""
        return str, (str(self),)


class Reduction(Protocol):
    """A metric over some of the items; merges with that over others."""

    @property
    def value(self) -> float:
        """The number."""

    @property
    def is_over_nothing(self) -> bool:
        """There is no number, as nothing was counted."""

    def merge(self, other: Self) -> Self:
        """The metric over the items of both."""


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
    def is_over_nothing(self) -> bool:
        """Nothing was counted."""
        return self.count == 0

    @property
    def value(self) -> float:
        """total / count, or NaN when nothing was counted."""
        return self.total / self.count if self.count else math.nan


@dataclass(frozen=True)
class Max:
    """The largest value of all parts; NaN if any part is NaN, so that it is never hidden."""

    value: float
    is_over_nothing: ClassVar[bool] = False

    def merge(self, other: Max) -> Max:
        """The larger of both."""
        return max(self, other, key=lambda part: (math.isnan(part.value), part.value))


@dataclass(frozen=True)
class Min:
    """The smallest value of all parts; NaN if any part is NaN, so that it is never hidden."""

    value: float
    is_over_nothing: ClassVar[bool] = False

    def merge(self, other: Min) -> Min:
        """The smaller of both."""
        return min(self, other, key=lambda part: (not math.isnan(part.value), part.value))


def merge_metrics(parts: Iterable[Mapping[str, Reduction]]) -> dict[str, Reduction]:
    """One mapping from many; a key that only some parts report merges over those.

    Raises:
        ValueError: two parts report one key with different rules.
    """
    merged: dict[str, Any] = {}
    for part in parts:
        for key, item in part.items():
            earlier = merged.get(key)
            if earlier is not None and type(earlier) is not type(item):
                raise ValueError(
                    f"metric {key!r} is reported as {type(earlier).__name__} by one part and as {type(item).__name__} "
                    f"by another: report it with one rule"
                )
            merged[key] = item if earlier is None else earlier.merge(item)
    return merged


def metric_values(metrics: Mapping[str, Reduction]) -> dict[str, float]:
    """The final number under each key; those over nothing are left out."""
    return {key: item.value for key, item in metrics.items() if not item.is_over_nothing}
