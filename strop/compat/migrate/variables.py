"""Variables of the environment that a script gives to its processes: Ray's runtime_env, and what it exports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.compat.migrate.result import Facts, Outcome, UnreadableError, many, refuse, skip
from strop.trainer.sections import check_env
from strop.utils.sanitize import is_secret, remember_secret


def variable(key: str, value: object, facts: Facts) -> Outcome:
    """One variable, by the last word of its key."""
    return variables(key, {key.rpartition(".")[2]: value}, facts)


def variables(key: str, value: object, facts: Facts) -> Outcome:
    """Several variables."""
    if not value:
        return skip("empty there too")
    if not isinstance(value, Mapping):
        raise UnreadableError(f"{value!r} would have to be variables and their values")
    ours: dict[str, Any] = {}
    notes = []
    for name, text in value.items():
        text = text if isinstance(text, int | float) and not isinstance(text, bool) else str(text)
        if is_secret(name, text):
            remember_secret(str(text))
            ours[f"resources.env.{name}"] = None
            notes.append(f"export {name} before the command, whose value is passed on")
            continue
        try:
            check_env({name: text})
        except ValueError as error:
            notes.append(str(error).removeprefix("resources.env names ").removesuffix("; leave it out"))
            continue
        ours[f"resources.env.{name}"] = text
    note = "; ".join(notes)
    return many(ours, note) if ours else refuse(note)
