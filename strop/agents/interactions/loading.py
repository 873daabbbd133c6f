"""The interactions of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.agents.interactions.base import BaseInteraction
from strop.agents.tools.class_loading import load_class, read_yaml


def load_interactions(path: str) -> dict[str, BaseInteraction]:
    """Interactions of a YAML file with the key `interaction`: entries of name, class_name and config.

    Raises:
        ValueError: the sentence names the entry.
    """
    made: dict[str, BaseInteraction] = {}
    for name, (where, found, entry) in interaction_classes(path).items():
        try:
            made[name] = found({**(entry.get("config") or {}), "name": name})
        except Exception as error:
            raise ValueError(
                f"{where}: {entry['class_name']} cannot be made: {type(error).__name__}: {error}"
            ) from error
    return made


def interaction_classes(path: str) -> dict[str, tuple[str, type, Mapping[str, Any]]]:
    """Of each interaction of the file by name: its entry for messages, its class, and the entry.

    An entry without a name has that of its class, in small letters, without the word Interaction at its end.

    Raises:
        ValueError: the sentence names the entry.
    """
    read = read_yaml(path, setting="agent.interactions")
    entries = read.get("interaction") if isinstance(read, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"agent.interactions: {path} must have the key `interaction` with a list")
    classes: dict[str, tuple[str, type, Mapping[str, Any]]] = {}
    for number, entry in enumerate(entries, start=1):
        where = f"agent.interactions: entry {number} of {path}"
        if not isinstance(entry, Mapping) or not entry.get("class_name"):
            raise ValueError(f"{where} has no class_name; an interaction has name, class_name and config")
        if unknown := set(entry) - {"name", "class_name", "config"}:
            raise ValueError(
                f"{where} has the unknown key {sorted(unknown)[0]!r}; an interaction has name, class_name and config"
            )
        found = load_class(str(entry["class_name"]), setting=where, folder=Path(path).expanduser().parent)
        name = str(entry.get("name") or found.__name__.removesuffix("Interaction").lower())
        if name in classes:
            raise ValueError(f"{where} has the name {name!r} of another one; rename one of them")
        missing = [
            method
            for method in ("start_interaction", "generate_response", "finalize_interaction")
            if not callable(getattr(found, method, None))
        ]
        if missing:
            raise ValueError(
                f"{where}: {entry['class_name']} has no method {missing[0]}; derive it from BaseInteraction"
            )
        classes[name] = where, found, entry
    return classes


def interaction_of_row(
    extra_info: Mapping[str, Any], interactions: Mapping[str, BaseInteraction], where: str
) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the interaction of a row: `extra_info.interaction_kwargs`, the key name among them.

    A run with a single interaction needs no name.

    Raises:
        ValueError: there is none of this name.
    """
    given = extra_info.get("interaction_kwargs") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: extra_info.interaction_kwargs is {given!r:.60}, not a dictionary")
    kwargs = {str(key): value for key, value in given.items() if key != "name" and value is not None}
    name = given.get("name") or (next(iter(interactions)) if len(interactions) == 1 else None)
    if name not in interactions:
        known = ", ".join(sorted(interactions)) or "none; name their file with agent.interactions"
        named = f"names the interaction {name!r}" if name else "names no interaction"
        raise ValueError(f"{where} {named} (extra_info.interaction_kwargs.name); the run has {known}")
    return str(name), kwargs
