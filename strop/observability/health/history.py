"""The metrics of a run so far, as the rules look at them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from fnmatch import fnmatchcase
from statistics import fmean

FIRST = 5
"""Values of the beginning that are kept: what a run is compared with."""
RECENT = 40
"""Newest values that are kept."""


class History:
    """For each metric its first and its newest values, in the order of the steps; steps without it are skipped."""

    def __init__(self) -> None:
        self._first: dict[str, list[float]] = {}
        self._recent: dict[str, deque[float]] = {}
        self._counts: dict[str, int] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take the numbers of the next step."""
        for name, value in metrics.items():
            first = self._first.setdefault(name, [])
            if len(first) < FIRST:
                first.append(float(value))
            self._recent.setdefault(name, deque(maxlen=RECENT)).append(float(value))
            self._counts[name] = self._counts.get(name, 0) + 1

    def count(self, name: str) -> int:
        """Steps that had this metric."""
        return self._counts.get(name, 0)

    def names(self, pattern: str) -> list[str]:
        """Metrics that a pattern fits, in which * is any text."""
        return [name for name in self._first if fnmatchcase(name, pattern)]

    def first(self, name: str) -> float | None:
        """Mean of the first five values; None before there are as many."""
        values = self._first.get(name, [])
        return fmean(values) if len(values) == FIRST else None

    def last(self, name: str, count: int, *, before: int = 0) -> list[float]:
        """The newest `count` values without the newest `before`; empty when there are not as many (at most 40)."""
        values = list(self._recent.get(name, ()))
        end = len(values) - before
        return values[end - count : end] if end >= count else []

    def mean(self, name: str, count: int, *, before: int = 0) -> float | None:
        """Mean of `last`; None where that is empty."""
        values = self.last(name, count, before=before)
        return fmean(values) if values else None
