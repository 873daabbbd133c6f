"""A configuration back to plain values and YAML."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from strop.config.errors import ConfigError
from strop.config.schema import join, tree
from strop.config.yaml_text import dump
from strop.utils.sanitize import secrets_in


def to_dict(config: object) -> dict[str, Any]:
    """Each field of a configuration, nested, as plain values (None, bool, int, float, str, list, dict)."""
    values: dict[str, Any] = _plain(config, "")
    return values


def to_flat_dict(config: object) -> dict[str, Any]:
    """The plain values of a configuration by their full keys; a free dict is one value."""
    root: type = type(config)
    keys = [key.key for key in tree(root).values() if not key.is_section]
    return {key: _plain(attrgetter(key)(config), key) for key in keys}


def save_config(config: object, path: str | Path) -> None:
    """Write each field as YAML, so that read_config gives an equal object; whole or not at all."""
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    unfinished.write_text(dump(to_dict(config)), encoding="utf-8")
    unfinished.replace(target)


def refuse_secrets(settings: Mapping[str, Any]) -> None:
    """Refuse settings with a key or a password, since a run folder holds its settings.

    Args:
        settings: plain values, nested or by their full keys.

    Raises:
        ConfigError: the sentence says which.
    """
    secret_keys = [key for key, _ in secrets_in(settings)]
    if secret_keys:
        raise ConfigError(
            f"{secret_keys[0]} holds a secret, and settings are written into the run folder: leave it out, and put it "
            f"into a variable of the environment, which functions and tools read with os.environ"
        )


def _plain(value: object, key: str) -> Any:
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, tuple | list):
        return [_plain(part, f"{key}[{i}]") for i, part in enumerate(value)]
    if isinstance(value, Mapping):
        return {name: _plain(part, join(key, name)) for name, part in value.items()}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConfigError(f"{key} holds a {type(value).__name__}, which a configuration file cannot hold")
