"""Answers to one prompt compared with each other: the order of each request, and the tally of each answer.

Judges favour places: the first answer, or the last. Every comparison is asked for in all rotations of its order, so
each answer stands at each place as often as the others, and what a place gives is given to all alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from strop.rewards.judges.config import JudgeConfig

Order = tuple[int, ...]
"""Answers as they are shown, by number."""


def orders(config: JudgeConfig, count: int) -> list[Order]:
    """Every request of a group of `count` answers.

    pairs: each answer with the `rounds` that follow it (with all others where that is not set), in both orders. list:
    all together, once for each answer that is shown first.
    """
    if count < 2:
        return []
    if config.compare == "list":
        return [tuple((first + position) % count for position in range(count)) for first in range(count)]
    most = count // 2
    rounds = most if config.rounds is None else min(config.rounds, most)
    met = {
        frozenset({number, (number + step) % count})
        for step in range(1, rounds + 1)
        for number in range(count)
    }
    pairs = sorted(tuple(sorted(pair)) for pair in met)
    return [order for left, right in pairs for order in ((left, right), (right, left))]


@dataclass
class Tally:
    """Points and failures of the comparisons of one answer."""

    points: list[float] = field(default_factory=list)
    at_first: list[float] = field(default_factory=list)
    """Points where it was shown first."""
    later: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Sentences about comparisons without a verdict."""

    @property
    def score(self) -> float:
        """Share of comparisons won, from 0 to 1, ties half; 0.5 where there was nothing to compare."""
        return fmean(self.points) if self.points else 0.5

    @property
    def position_bias(self) -> float:
        """Mean points where it was shown first, less those where it was shown later."""
        return fmean(self.at_first) - fmean(self.later) if self.at_first and self.later else 0.0

    @property
    def failed(self) -> str:
        """Reason why it has no score; empty where it has one. An answer that no judge can be asked about has not lost:
        it has no score, and more than half of its comparisons came to nothing."""
        return self.failures[0] if len(self.failures) > len(self.points) else ""


def tally_comparisons(count: int, results: Sequence[tuple[Order, Sequence[float] | str]]) -> list[Tally]:
    """The comparisons of each of `count` answers.

    Args:
        results: of each request the order, and the points at each position of it or the reason why there are none.
    """
    tallies = [Tally() for _ in range(count)]
    for order, points in results:
        for position, number in enumerate(order):
            tally = tallies[number]
            if isinstance(points, str):
                tally.failures.append(points)
                continue
            tally.points.append(points[position])
            (tally.later if position else tally.at_first).append(points[position])
    return tallies
