"""Conversions of values that several tables use; each takes the value and all facts, and may answer an outcome."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.config.migration.outcomes import Convert, Facts, Outcome, UnreadableError, many, refuse, skip


def integer(value: Any, facts: Facts) -> int:
    """A whole number; 1e3 and 3.0 are whole.

    Raises:
        UnreadableError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise UnreadableError(f"{value!r} would have to be a whole number")
    return int(value)


def number(value: Any, facts: Facts) -> float:
    """A number.

    Raises:
        UnreadableError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnreadableError(f"{value!r} would have to be a number")
    return value


def one_or_more(value: Any, facts: Facts) -> list[Any] | Outcome:
    """A list; a value alone becomes a list of one, nothing is left out."""
    if value is None:
        return skip("empty there too")
    return list(value) if isinstance(value, list | tuple) else [value]


def pair(value: Any, facts: Facts) -> list[Any]:
    """Two numbers.

    Raises:
        UnreadableError: they are none.
    """
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise UnreadableError(f"{value!r} would have to be two numbers")
    return list(value)


def never_below_zero(value: Any, facts: Facts) -> int:
    """Their -1 for off as our 0."""
    return max(0, integer(value, facts))


def if_set(convert: Convert | None = None) -> Convert:
    """Null and empty text mean that nothing was set."""

    def rule(value: Any, facts: Facts) -> Any:
        if value is None or value == "":
            return skip("not set")
        return value if convert is None else convert(value, facts)

    return rule


def if_any(value: Any, facts: Facts) -> Any:
    """A mapping or list, unless it is empty."""
    return value or skip("empty there too")


def choice(ours: Mapping[Any, Any], *, instead: str) -> Convert:
    """A value by its name; an outcome in the mapping is the answer, and other names are refused."""

    def rule(value: Any, facts: Facts) -> Any:
        if value is None:
            return skip("not set")
        known = ours.get(value) if isinstance(value, str | bool | int) else None
        return refuse(f"strop does not have it; {instead}") if known is None else known

    return rule


ORDER = choice({True: "shuffled", False: "in_order"}, instead="use shuffled or in_order: data.sampler")
"""Rows are shuffled, or not."""


def model_path(ours: str) -> Convert:
    """A model folder; a hub id is translated, with the word that it must be downloaded."""

    def rule(value: Any, facts: Facts) -> Outcome:
        if not isinstance(value, str) or not value:
            return skip("not set")
        is_local = value.startswith(("/", ".", "~"))
        note = (
            "" if is_local else "strop reads a folder: if this is the name of a model on a hub, download it"
        )
        return many({ours: value}, note)

    return rule


def tracker_names(value: Any, known: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """(our trackers, names that have none here) of one name or a list of names."""
    names = [value] if isinstance(value, str) else list(value or [])
    return [known[name] for name in names if name in known], [name for name in names if name not in known]
