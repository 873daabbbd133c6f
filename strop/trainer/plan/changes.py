"""Copies of a configuration with other values."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from strop.trainer.config import Config


def with_values(config: Config, values: Mapping[str, object]) -> Config:
    """A copy with these values.

    Args:
        config: stays as it is.
        values: by their full keys.

    Raises:
        ValueError: they do not go together.
    """
    changed: Config = _replaced(config, values)
    return changed


def of_engines(config: Config, **values: object) -> dict[str, object]:
    """The same values for the engine of every role with a model, by their full keys."""
    return {f"{role}.engine.{name}": value for role in config.used_engines for name, value in values.items()}


def _replaced(section: Any, values: Mapping[str, object]) -> Any:
    """A section with other values, by keys in it."""
    below = defaultdict[str, dict[str, object]](dict)
    fields = dict[str, object]()
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            below[name][rest] = value
        else:
            fields[name] = value
    for name, inner in below.items():
        fields[name] = _replaced(getattr(section, name), inner)
    return dataclasses.replace(section, **fields)
