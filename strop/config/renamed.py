"""Keys that were renamed: for one version the old name is taken as the new one, and a sentence says so."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

RENAMED = {"reward.policies": "reward.on_failure"}
"""Full keys of 0.1, each with its name since 0.2. An entry leaves with 0.3."""


def current_key(key: str) -> str:
    """The full key, with the name that it has now; what is below a renamed key is renamed with it."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            _tell(old)
            return new + key[len(old) :]
    return key


def with_current_keys(values: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Nested values of a section under the names that their keys have now; changes and returns what it is given.

    Args:
        values: as somebody wrote them.
        section: full key of the section; "" for the whole tree.

    Raises:
        ValueError: an old and a new name of the same key are both given.
    """
    above = f"{section}." if section else ""
    for old, new in RENAMED.items():
        if not (old.startswith(above) and new.startswith(above)):
            continue
        *way, name = old[len(above) :].split(".")
        holder = _below(values, way)
        if holder is None or name not in holder:
            continue
        *new_way, new_name = new[len(above) :].split(".")
        target: Any = values
        for part in new_way:
            target = target.setdefault(part, {})
        if not isinstance(target, dict):
            continue  # no section, which is found and said where it is built
        if new_name in target:
            raise ValueError(f"{old} and {new}, its name since 0.2, are both given: keep {new}")
        target[new_name] = holder.pop(name)
        _tell(old)
    return values


def _below(values: Any, way: list[str]) -> dict[str, Any] | None:
    for part in way:
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, dict) else None


def _tell(old: str) -> None:
    logger.warning(f"{old} is called {RENAMED[old]} since 0.2; it was taken as that")
