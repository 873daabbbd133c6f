"""Tables of rows, and how a table is applied to the settings that were found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strop.config.migration.found import Found
from strop.config.migration.outcomes import ACCOUNTED, Facts, Outcome, Rule, UnreadableError, skip
from strop.config.migration.rules import OnlyIf
from strop.config.schema import nearest

_ANY_VALUES: tuple[Any, ...] = (True, False, 1, 0.5)
"""Values of several kinds, to see whether an answer depends on the value."""


@dataclass(frozen=True)
class Entry:
    """One row of a table: a key of the other library, and what becomes of it."""

    key: str
    """Full key. One that ends in `.*` stands for every key below a section that has no row of its own; one that
    begins with `*.` for a name in any section."""
    rule: Rule


def under(section: str, *entries: Entry) -> tuple[Entry, ...]:
    """The rows with the name of their section in front."""
    return tuple(replace(entry, key=f"{section}.{entry.key}") for entry in entries)


def same(rule: Rule, names: str) -> tuple[Entry, ...]:
    """A row for each of the names, between blanks, all with one rule."""
    return tuple(Entry(name, rule) for name in names.split())


def only_if(condition: Callable[[Facts], bool], why_not: str, entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """The rows, answering `why_not` where the condition does not hold."""
    return tuple(Entry(entry.key, OnlyIf(condition, why_not, entry.rule)) for entry in entries)


def make_table(*groups: Iterable[Entry]) -> dict[str, Rule]:
    """The rules by key.

    Raises:
        ValueError: a key has two rows.
    """
    table: dict[str, Rule] = {}
    for entry in (entry for group in groups for entry in group):
        if entry.key in table:
            raise ValueError(f"the key {entry.key} has two rows; keep one")
        table[entry.key] = entry.rule
    return table


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table a user sees."""

    key: str
    """The other library's key."""
    value: Any
    """Its value, as it was found."""
    outcome: Outcome
    place: str = ""
    """Where it was found; `default` for what the files leave to the other library's defaults."""


@dataclass(frozen=True, kw_only=True)
class Migration:
    """All settings with what becomes of them, and the configuration they make."""

    rows: tuple[Row, ...]

    @property
    def values(self) -> dict[str, Any]:
        """Our configuration, nested, in the order of the rows; a later row wins."""
        nested: dict[str, Any] = {}
        for row in self.rows:
            for key, value in row.outcome.ours.items():
                _put(nested, key.split("."), value)
        return nested

    @property
    def open_rows(self) -> tuple[Row, ...]:
        """Settings that nothing accounts for: unknown keys and values that could not be read."""
        return tuple(row for row in self.rows if row.outcome.status not in ACCOUNTED)

    def clashes(self) -> dict[str, tuple[Row, ...]]:
        """Our keys that several rows set to different values."""
        by_key: dict[str, list[Row]] = {}
        for row in self.rows:
            for key in row.outcome.ours:
                by_key.setdefault(key, []).append(row)
        return {
            key: tuple(rows)
            for key, rows in by_key.items()
            if any(row.outcome.ours[key] != rows[0].outcome.ours[key] for row in rows[1:])
        }


def apply_table(
    found: Sequence[Found],
    table: Mapping[str, Rule],
    defaults: Mapping[str, Any],
    *,
    write_out: Sequence[str],
) -> Migration:
    """Ask the table about every setting.

    Args:
        found: in their order; a later one of the same key replaces an earlier one, which gets a row too.
        table: rules by key, as `make_table` makes them.
        defaults: of the other library, for the facts.
        write_out: keys whose defaults are translated where the files leave them out, since ours differ.
    """
    last = {one.key: index for index, one in enumerate(found)}
    in_force = {
        one.key: one for index, one in enumerate(found) if last[one.key] == index and one.kind != "reset"
    }
    unread = {key for key, one in in_force.items() if one.unresolved or one.problem}
    facts = Facts({key: one.value for key, one in in_force.items() if key not in unread}, defaults, unread)
    rows = [
        Row(key=key, value=defaults[key], outcome=_ask(table, key, defaults[key], facts), place="default")
        for key in write_out
        if key not in in_force
    ]
    for index, one in enumerate(found):
        outcome = (
            _outcome(one, table, facts)
            if last[one.key] == index
            else skip("set again further down, which is what counts")
        )
        rows.append(Row(key=one.key, value=one.value, outcome=outcome, place=one.place))
    return Migration(rows=tuple(rows))


def find_rule(table: Mapping[str, Rule], key: str) -> Rule | None:
    """The rule for a key: its own, that of its name in any section, or that of the nearest section above it."""
    parts = key.split(".")
    sections = (".".join((*parts[:length], "*")) for length in range(len(parts) - 1, 0, -1))
    for candidate in (key, f"*.{parts[-1]}", *sections):
        if candidate in table:
            return table[candidate]
    return None


def _outcome(one: Found, table: Mapping[str, Rule], facts: Facts) -> Outcome:
    if one.problem:
        return Outcome(status="unknown", note=one.problem)
    if one.kind == "reset":
        return skip("takes the key away again, so the default holds")
    if find_rule(table, one.key) is None:
        near = nearest(one.key, [key for key in table if "*" not in key])
        return Outcome(
            status="unknown", note=f"the nearest known key is {near}" if near else "no known key is near"
        )
    if not one.unresolved:
        return _ask(table, one.key, one.value, facts)
    answers = [_ask(table, one.key, value, facts) for value in (one.value, *_ANY_VALUES)]
    if {answer.status for answer in answers} in ({"not needed"}, {"refused"}):
        return answers[0]  # whatever the value is
    names = ", ".join(one.unresolved)
    ours = ", ".join(next((answer.ours for answer in answers if answer.ours), ["what it says"]))
    return Outcome(
        status="unresolved",
        note=f"{names} is not set in what was given, so {ours} is left out: {one.way_out}",
    )


def _ask(table: Mapping[str, Rule], key: str, value: Any, facts: Facts) -> Outcome:
    rule = find_rule(table, key)
    assert rule is not None, "only keys of the table are asked for"
    try:
        return rule(key, value, facts)
    except UnreadableError as error:
        return Outcome(status="unresolved", note=str(error))
    except TypeError:  # a list where the other library has a number, and the like
        return Outcome(status="unresolved", note=f"{value!r} is of a kind that {key} does not take")


def _put(nested: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        nested = nested.setdefault(part, {})
    nested[parts[-1]] = value
