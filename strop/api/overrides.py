"""Settings that a caller gives in Python, as overrides of the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Settings = Mapping[str, Any] | Sequence[str]
"""Settings by key (`{"actor.optim.lr": 1e-6}`), or as on the command line (`["actor.optim.lr=1e-6"]`)."""


def override_of(setting: tuple[str, object]) -> str:
    """A key and its value as on the command line."""
    key, value = setting
    return f"{key}={_in_words(value)}"


def overrides_of(settings: Settings) -> list[str]:
    """Settings as on the command line.

    Raises:
        ValueError: they are neither.
    """
    if isinstance(settings, Mapping):
        return list(map(override_of, settings.items()))
    if isinstance(settings, str) or not isinstance(settings, Iterable):
        raise ValueError(
            f"settings is {settings!r:.80}: give a dictionary, {{'actor.optim.lr': 1e-6}}, or a list of words as on "
            f"the command line, ['actor.optim.lr=1e-6']"
        )
    return list(settings)


def _in_words(value: object) -> str:
    """A value in the grammar of overrides."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_in_words(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_in_words, value)) + "]"
    text = str(value)
    if text.isidentifier() and text not in ("null", "true", "false"):
        return text
    # Backslashes are doubled where they stand before a quote, the last one included.
    return "'" + re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text) + "'"
