"""Metrics, declared beside the function that makes them: the name that is charted, its unit, and what a number is.

Whoever asks for a metric (health rules, docs) takes it from its declaration, so that a name cannot change in one place
alone.
"""

from __future__ import annotations

import re
from typing import Any

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
    """What one number stands for, and over what it is a mean, a sum, a largest or a smallest."""

    def __new__(cls, name: str, unit: str, over: str) -> Metric:
        """Declare it.

        Raises:
            ValueError: the name is declared already, as something else.
        """
        metric = super().__new__(cls, name)
        metric.unit, metric.over = unit, over
        known = METRICS.setdefault(name, metric)
        if (known.unit, known.over) != (unit, over):
            raise ValueError(
                f"metric {name!r} is declared twice: {known.over!r}, and {over!r}; take one, or another name"
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
        given = iter(words)
        return _PLACE.sub(lambda _: next(given), self)

    @property
    def last(self) -> str:
        """What is behind the last slash: its name among the statistics of a loss."""
        return self.rpartition("/")[2]

    def __reduce__(self) -> tuple[Any, ...]:
        """As a plain text: other processes have declarations of their own."""
        return str, (str(self),)
