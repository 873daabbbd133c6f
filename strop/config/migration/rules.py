"""The rules that rows of a table carry: values that are asked with a setting and answer what becomes of it.

What depends on several keys, such as batch sizes, is a function of the same shape, beside the table that uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from strop.config.migration.outcomes import Convert, Facts, Outcome, Rule, many, refuse, skip


@dataclass(frozen=True)
class To:
    """Our key, with the value as it is or converted."""

    key: str
    """Our full key."""
    convert: Convert | None = None
    """Ours from theirs; may answer an outcome in place of a value."""
    note: str = ""
    """What to know about it."""

    def __call__(self, key: str, value: Any, facts: Facts) -> Outcome:
        converted = value if self.convert is None else self.convert(value, facts)
        return converted if isinstance(converted, Outcome) else many({self.key: converted}, self.note)


@dataclass(frozen=True)
class NotNeeded:
    """Nothing to set here, whatever the value."""

    why: str

    def __call__(self, key: str, value: Any, facts: Facts) -> Outcome:
        return skip(self.why)


@dataclass(frozen=True)
class Refused:
    """We cannot do it, whatever the value."""

    why: str
    """With what to use in its place."""

    def __call__(self, key: str, value: Any, facts: Facts) -> Outcome:
        return refuse(self.why)


@dataclass(frozen=True)
class Unless:
    """Not needed for the harmless values (and null), refused for any other."""

    harmless: tuple[Any, ...]
    why_refused: str
    """With what to use in its place."""
    else_note: str = "that is how strop works"

    def __call__(self, key: str, value: Any, facts: Facts) -> Outcome:
        if value is None or any(_is_same(value, one) for one in self.harmless):
            return skip(self.else_note)
        return refuse(self.why_refused)


@dataclass(frozen=True)
class WhenTrue:
    """Our keys and values where theirs is true; not needed where it is false."""

    ours: tuple[tuple[str, Any], ...]
    otherwise: str
    note: str = ""

    def __call__(self, key: str, value: Any, facts: Facts) -> Outcome:
        return many(dict(self.ours), self.note) if value is True else skip(self.otherwise)


@dataclass(frozen=True)
class Below:
    """Every key below a section of theirs, under its own name below one of ours."""

    section: str
    ours: str

    def __call__(self, key: str, value: Any, facts: Facts) -> Outcome:
        return many({f"{self.ours}.{key.removeprefix(self.section + '.')}": value})


@dataclass(frozen=True)
class OnlyIf:
    """Another rule where a condition holds; not needed where it does not."""

    condition: Callable[[Facts], bool]
    why_not: str
    rule: Rule

    def __call__(self, key: str, value: Any, facts: Facts) -> Outcome:
        return self.rule(key, value, facts) if self.condition(facts) else skip(self.why_not)


def _is_same(value: Any, other: Any) -> bool:
    """Equal, and True is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
