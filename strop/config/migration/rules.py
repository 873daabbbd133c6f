"""What a row of a translation table can say, and how a table is applied to the settings that were found.

A table maps each key of the other library to a rule. A rule is asked with the value and with all the facts, for
what depends on several keys (batch sizes), and answers with an outcome: our keys and values, or why there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from strop.config.migration.found import Found
from strop.config.schema import nearest

Status = Literal["translated", "not needed", "refused", "unresolved", "unknown"]

ACCOUNTED: frozenset[Status] = frozenset({"translated", "not needed", "refused"})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What becomes of one setting."""

    status: Status
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Our full keys and their plain values."""
    note: str = ""
    """Why, or what to know about it."""


class Facts:
    """All settings that were found, over the other library's own defaults."""

    def __init__(
        self, given: Mapping[str, Any], defaults: Mapping[str, Any], unread: Collection[str] = ()
    ) -> None:
        self._given, self._defaults, self._unread = given, defaults, unread

    def is_given(self, key: str) -> bool:
        """The files set the key."""
        return key in self._given

    def get(self, key: str) -> Any:
        """The value in force; None where neither the files nor the defaults have one.

        Raises:
            UnreadableError: the files set it, to a value that could not be read, so the default does not hold.
        """
        if key in self._unread and key in self._defaults:
            raise UnreadableError(f"depends on {key}, which could not be read")
        value = self._given.get(key)
        return self._defaults.get(key) if value is None else value

    def number(self, key: str) -> int | float:
        """The value in force, as a number; an error sentence where it is none.

        Raises:
            UnreadableError: it is no number.
        """
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnreadableError(f"{key} is {value!r} and would have to be a number")
        return value


class UnreadableError(ValueError):
    """A value that a rule cannot read; the message says why."""


_ANY_VALUES: tuple[Any, ...] = (True, False, 1, 0.5)
"""Values of several kinds, to see whether an answer depends on the value."""

Convert = Callable[[Any, Facts], Any]
Rule = Callable[[str, Any, Facts], Outcome]
"""(their key, its value, all facts) -> what becomes of it."""


def to(key: str, convert: Convert | None = None, *, note: str = "") -> Rule:
    """Our key, with the value as it is or converted; `convert` may return an Outcome instead of a value."""

    def rule(key_of_theirs: str, value: Any, facts: Facts) -> Outcome:
        converted = value if convert is None else convert(value, facts)
        if isinstance(converted, Outcome):
            return converted
        return Outcome(status="translated", ours={key: converted}, note=note)

    return rule


def many(ours: Mapping[str, Any], note: str = "") -> Outcome:
    """Several of our keys, or none but a note."""
    return Outcome(status="translated", ours=ours, note=note)


def not_needed(why: str) -> Rule:
    """The same answer whatever the value."""
    return lambda key, value, facts: skip(why)


def refused(why: str) -> Rule:
    """We cannot do it, whatever the value."""
    return lambda key, value, facts: refuse(why)


def unless(harmless: Sequence[Any], why_refused: str, *, else_note: str = "that is how strop works") -> Rule:
    """Not needed for the harmless values (and null), refused for any other."""

    def rule(key_of_theirs: str, value: Any, facts: Facts) -> Outcome:
        if value is None or any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless
        ):
            return skip(else_note)
        return refuse(why_refused)

    return rule


def skip(why: str) -> Outcome:
    """The outcome of a setting that has nothing to set here."""
    return Outcome(status="not needed", note=why)


def refuse(why: str) -> Outcome:
    """The outcome of a setting that asks for what strop does not do."""
    return Outcome(status="refused", note=why)


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
        table: rules by key; a key that ends in `.*` is for all keys below it, the longest one first.
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
    """The rule for a key: its own, or that of the nearest section above it."""
    if key in table:
        return table[key]
    parts = key.split(".")
    for length in range(len(parts) - 1, 0, -1):
        section = ".".join((*parts[:length], "*"))
        if section in table:
            return table[section]
    return None


def _outcome(one: Found, table: Mapping[str, Rule], facts: Facts) -> Outcome:
    if one.problem:
        return Outcome(status="unknown", note=one.problem)
    if one.kind == "reset":
        return skip("takes the key away again, so the default holds")
    if find_rule(table, one.key) is None:
        near = nearest(one.key, [key for key in table if not key.endswith(".*")])
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
