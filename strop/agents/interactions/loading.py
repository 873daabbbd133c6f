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
    interactions: dict[str, BaseInteraction] = {}
    for name, (label, interaction_class, entry) in interaction_classes(path).items():
        try:
            interactions[name] = interaction_class({**(entry.get("config") or {}), "name": name})
        except Exception as error:
            raise ValueError(
                f"{label}: {entry['class_name']} cannot be made: {type(error).__name__}: {error}"
            ) from error
    return interactions


def interaction_classes(path: str) -> dict[str, tuple[str, type, Mapping[str, Any]]]:
    """Interactions of the file by name: label of the entry for messages, class, and entry.

    An entry without a name has that of its class, in small letters, without the word Interaction at its end.

    Raises:
        ValueError: the sentence names the entry.
    """
    content = read_yaml(path, setting="agent.interactions")
    entries = content.get("interaction") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"agent.interactions: {path} must have the key `interaction` with a list")
    classes: dict[str, tuple[str, type, Mapping[str, Any]]] = {}
    for number, entry in enumerate(entries, start=1):
        label = f"agent.interactions: entry {number} of {path}"
        if not isinstance(entry, Mapping) or not entry.get("class_name"):
            raise ValueError(f"{label} has no class_name; an interaction has name, class_name and config")
        if unknown := set(entry) - {"name", "class_name", "config"}:
            raise ValueError(
                f"{label} has the unknown key {sorted(unknown)[0]!r}; an interaction has name, class_name and config"
            )
        interaction_class = load_class(
            str(entry["class_name"]), setting=label, folder=Path(path).expanduser().parent
        )
        name = str(entry.get("name") or interaction_class.__name__.removesuffix("Interaction").lower())
        if name in classes:
            raise ValueError(f"{label} has the name {name!r} of another one; rename one of them")
        missing = [
            method
            for method in ("start_interaction", "generate_response", "finalize_interaction")
            if not callable(getattr(interaction_class, method, None))
        ]
        if missing:
            raise ValueError(
                f"{label}: {entry['class_name']} has no method {missing[0]}; derive it from BaseInteraction"
            )
        classes[name] = label, interaction_class, entry
    return classes


def interaction_of_row(
    extra_info: Mapping[str, Any], interactions: Mapping[str, BaseInteraction], label: str
) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the interaction of a row: `extra_info.interaction_kwargs`, the key name among them.

    A run with a single interaction needs no name.

    Raises:
        ValueError: there is none of this name.
    """
    row_kwargs = extra_info.get("interaction_kwargs") or {}
    if not isinstance(row_kwargs, Mapping):
        raise ValueError(f"{label}: extra_info.interaction_kwargs is {row_kwargs!r:.60}, not a dictionary")
    kwargs = {str(key): value for key, value in row_kwargs.items() if key != "name" and value is not None}
    name = row_kwargs.get("name") or (next(iter(interactions)) if len(interactions) == 1 else None)
    if name not in interactions:
        choices = ", ".join(sorted(interactions)) or "none; name their file with agent.interactions"
        problem = f"names the interaction {name!r}" if name else "names no interaction"
        raise ValueError(f"{label} {problem} (extra_info.interaction_kwargs.name); the run has {choices}")
    return str(name), kwargs
