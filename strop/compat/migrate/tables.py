"""Tables of rows, read from TOML, and their application to the settings of a script.

A file has a table for each section of the other library, whose entries are rows by key, several keys between blanks;
in its tables `not_needed`, `not_there` and `refused`, the sentence comes first and the keys after it. Keys below
`root` stand in no section. `[template.NAME]` holds rows for several sections, and `[[use]]` says for which: `section`,
`words` for the {braces} in it, and `kinds` where it is not for every kind of training. `[defaults]` is what the
library assumes, as far as something here depends on it, `[defaults_of.KIND]` for one kind of training; `[written_out]`
names by kind those that differ from ours. `base` is a file whose templates and root are taken too. `[only_if]`
has the condition of all rows of a section.
"""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from strop.compat.migrate.result import ACCOUNTED, Facts, Outcome, Rule, UnreadableError, refuse, skip
from strop.compat.migrate.rules import Functions, rule_of
from strop.compat.migrate.source import Found
from strop.utils.field_types import nearest
from strop.utils.sanitize import is_secret, remember_secrets_in, secrets_in, without_secrets

_ANY_VALUES: tuple[Any, ...] = (True, False, 1, 0.5)
"""Values of several kinds, to see whether an answer depends on the value."""
_BY_SENTENCE = ("not_needed", "not_there", "refused")
_NO_SECTIONS = ("template", "use", "defaults", "defaults_of", "written_out", "root", "only_if")


_SECRETS = {"use_wandb": "wandb_key", "logger.wandb.key": "wandb_key"}
"""Names that do not say that their value is a key, and one that does."""
_SOME_KEY = "Abcdefgh-12345678"
"""In place of a key that nobody knows here."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rules of a library's keys, and its defaults."""

    rows: Mapping[str, Mapping[str, Any]]
    """By full key. One that ends in `.*` stands for every key below a section that has no row of its own; one that
    begins with `*.` for a name in any section."""
    rules: Mapping[str, Rule]
    """The rows' rules, by the same keys."""
    defaults: Mapping[str, Any]
    """Defaults of the library."""
    written_out: tuple[str, ...]
    """Keys whose defaults are translated where the files leave them out, since ours differ."""

    def find(self, key: str) -> Rule | None:
        """The rule for a key: its own, that of its name in any section, or that of the nearest section above it."""
        parts = key.split(".")
        sections = (".".join((*parts[:length], "*")) for length in range(len(parts) - 1, 0, -1))
        return next((self.rules[at] for at in (key, f"*.{parts[-1]}", *sections) if at in self.rules), None)


def read_table(name: str, functions: Functions, *, kind: str = "") -> Table:
    """The table of a file beside this module, for one kind of training.

    Args:
        name: of the file, without .toml.
        functions: what its rows name.
        kind: stands for {kind}, and chooses among the uses of templates.

    Raises:
        ValueError: a key has two rows, or a row is none.
    """
    file = _filled(_read(name), {"kind": kind})
    rows: dict[str, Mapping[str, Any]] = {}
    for key, row in _rows(file, kind):
        if key in rows:
            raise ValueError(f"the key {key} has two rows in {name}.toml; keep one")
        condition = next(
            (c for section, c in file.get("only_if", {}).items() if key.startswith(f"{section}.")), None
        )
        rows[key] = row if condition is None else {"only_if": condition, **row}
    return Table(
        rows=rows,
        rules={key: rule_of(row, functions) for key, row in rows.items()},
        defaults={**file.get("defaults", {}), **file.get("defaults_of", {}).get(kind, {})},
        written_out=tuple(file.get("written_out", {}).get(kind, "").split()),
    )


def _read(name: str) -> dict[str, Any]:
    """A file, with the templates and the keys in no section of the one that it names as `base`."""
    file = tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))
    base = _read(file.pop("base")) if "base" in file else {}
    of_base, root = base.get("root", {}), file.get("root", {})
    sentences = {kind: {**of_base.get(kind, {}), **root.get(kind, {})} for kind in _BY_SENTENCE}
    return {
        "template": base.get("template", {}),
        **file,
        "root": {**of_base, **root, **{kind: rows for kind, rows in sentences.items() if rows}},
    }


def _rows(file: Mapping[str, Any], kind: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield from _of_section("", file.get("root", {}))
    for section, entries in file.items():
        if section not in _NO_SECTIONS:
            yield from _of_section(f"{section}.", entries)
    for use in file.get("use", ()):
        if kind in use.get("kinds", (kind,)):
            section = use["section"]
            entries = _filled(file["template"][use["template"]], {"section": section, **use.get("words", {})})
            yield from _of_section(section and f"{section}.", entries)


def _of_section(prefix: str, entries: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for names, row in entries.items():
        if names in _BY_SENTENCE:
            for reason, keys in row.items():
                yield from ((f"{prefix}{key}", {names: reason}) for key in keys.split())
            continue
        for key in names.split():
            yield f"{prefix}{key}", {"to": row} if isinstance(row, str) else row


def _filled(tree: object, words: Mapping[str, str]) -> Any:
    """The tree with the words in place of their names in braces."""
    if isinstance(tree, dict):
        return {_filled(key, words): _filled(value, words) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_filled(item, words) for item in tree]
    if isinstance(tree, str):
        for name, word in words.items():
            tree = tree.replace(f"{{{name}}}", word)
    return tree


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table a user sees."""

    key: str
    """The other library's key."""
    value: Any
    """Its value, as it was found."""
    outcome: Outcome
    place: str = ""
    """Location of the setting; `default` for what the files leave to the other library's defaults."""


@dataclass(frozen=True, kw_only=True)
class Migration:
    """All settings with their outcomes, and the configuration they make."""

    rows: tuple[Row, ...]

    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ours, by their full keys, that are given beside the files."""

    @property
    def values(self) -> dict[str, Any]:
        """Our configuration, nested, in the order of the rows; a later row wins, and what is given beside them. The
        entries of a free dict may come from several rows."""
        nested: dict[str, Any] = {}
        for row in self.rows:
            for key, value in row.outcome.ours.items():
                entries = value.items() if isinstance(value, Mapping) and value else [("", value)]
                for name, entry in entries:
                    _set_nested(nested, [*key.split("."), *([name] if name else [])], copy.deepcopy(entry))
        for key, value in self.overrides.items():
            _set_nested(nested, key.split("."), value)
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
    settings: Sequence[Found], table: Table, *, defaults: Mapping[str, Any], write_out: Sequence[str]
) -> Migration:
    """Migration of every setting by its row of the table.

    Args:
        settings: in their order; a later one of the same key replaces an earlier one, which gets a row too.
        table: of the other library.
        defaults: of the other library in the setting at hand, for the facts.
        write_out: keys whose defaults are translated where the files leave them out, since ours differ.
    """
    last = {setting.key: index for index, setting in enumerate(settings)}
    in_force = {
        setting.key: setting
        for index, setting in enumerate(settings)
        if last[setting.key] == index and setting.kind != "reset"
    }
    unread = {key for key, setting in in_force.items() if setting.unresolved or setting.problem}
    facts = Facts(
        {key: setting.value for key, setting in in_force.items() if key not in unread}, defaults, unread
    )
    rows = [
        Row(key=key, value=defaults[key], outcome=_ask(table, key, defaults[key], facts), place="default")
        for key in write_out
        if key not in in_force
    ]
    for index, setting in enumerate(settings):
        outcome = (
            _outcome(setting, table, facts)
            if last[setting.key] == index
            else skip("set again further down, which is what counts")
        )
        row = Row(
            key=setting.written or setting.key, value=setting.value, outcome=outcome, place=setting.place
        )
        rows.append(_without_secrets(row, setting.key))
    return Migration(rows=tuple(rows))


def _without_secrets(row: Row, key: str) -> Row:
    """The row with `[redacted]` in place of keys and passwords, which are neither shown nor written."""
    settings = {_SECRETS.get(key, key): row.value}
    remember_secrets_in(settings)
    outcome = row.outcome
    secret_keys = {ours for ours, value in outcome.ours.items() for _ in secrets_in(value, ours)}
    if secret_keys:
        ours_kept = {ours: value for ours, value in outcome.ours.items() if ours not in secret_keys}
        keys = ", ".join(secret_keys)
        reason = f"a secret is not written into a file: leave {keys} out, and let your code read a variable"
        outcome = refuse(reason) if not ours_kept else replace(outcome, ours=ours_kept, note=reason)
    (value,) = without_secrets(settings).values()
    return replace(row, value=value, outcome=outcome)


def _outcome(setting: Found, table: Table, facts: Facts) -> Outcome:
    if setting.problem:
        rule = table.find(setting.key)
        answer = (
            _ask(table, setting.key, setting.value, facts)
            if rule is not None and setting.value != ""
            else None
        )
        if answer is not None and answer.status == "not needed":
            return answer  # whatever it says
        return Outcome(status="unknown", note=setting.problem)
    if setting.kind == "reset":
        return skip("takes the key away again, so the default holds")
    if table.find(setting.key) is None:
        suggestion = nearest(setting.key, [key for key in table.rules if "*" not in key])
        return Outcome(
            status="unknown",
            note=f"the nearest known key is {suggestion}" if suggestion else "no known key is near",
        )
    if not setting.unresolved:
        return _ask(table, setting.key, setting.value, facts)
    if is_secret(_SECRETS.get(setting.key, setting.key), _SOME_KEY):  # whatever it is, it is not asked for
        return _ask(table, setting.key, _SOME_KEY, facts)
    answers = [_ask(table, setting.key, value, facts) for value in (setting.value, *_ANY_VALUES)]
    statuses = {answer.status for answer in answers}
    if statuses in ({"not needed"}, {"not there"}, {"refused"}):
        return answers[0]  # whatever the value is
    names = ", ".join(setting.unresolved)
    ours = ", ".join(next((answer.ours for answer in answers if answer.ours), ["what it says"]))
    return Outcome(
        status="unresolved", note=f"{names} {setting.reason}, so {ours} is left out: {setting.way_out}"
    )


def _ask(table: Table, key: str, value: object, facts: Facts) -> Outcome:
    rule = table.find(key)
    assert rule is not None, "only keys of the table are asked for"
    try:
        return rule(key, value, facts)
    except UnreadableError as error:
        return Outcome(status="unresolved", note=str(error))
    except TypeError:  # a list where the other library has a number, and the like
        return Outcome(status="unresolved", note=f"{value!r} is of a kind that {key} does not take")


def _set_nested(nested: dict[str, Any], parts: Sequence[str], value: object) -> None:
    for part in parts[:-1]:
        nested = nested.setdefault(part, {})
    nested[parts[-1]] = value
