"""A configuration back to plain values and YAML."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.config.errors import ConfigError
from strop.config.schema import field_specs, join, section_default
from strop.config.yaml_text import dump


def to_dict(config: Any) -> dict[str, Any]:
    """Each field of a configuration, nested, as plain values (None, bool, int, float, str, list, dict)."""
    return _section(config, "")


def save_config(config: Any, path: str | Path) -> None:
    """Write each field as YAML, so that read_config gives an equal object; whole or not at all."""
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    unfinished.write_text(dump(to_dict(config)), encoding="utf-8")
    unfinished.replace(target)


def changed_keys(config: Any) -> dict[str, Any]:
    """The full keys whose values differ from the defaults, and the values, plain.

    Keys without a default are always there. A section that is absent by default is one entry, with all of
    its fields.
    """
    changed: dict[str, Any] = {}
    _changed(config, None, "", changed)
    return changed


def _changed(config: Any, base: Any, prefix: str, changed: dict[str, Any]) -> None:
    """Collect what differs from `base` (the section's own default) or, where that is None, from the class."""
    cls: type = type(config)
    for spec in field_specs(cls).values():
        key, value = join(prefix, spec.name), getattr(config, spec.name)
        default = section_default(spec, base)
        is_required = base is None and spec.required
        if spec.section is not None and value is not None and (default is not None or is_required):
            _changed(value, default, key, changed)
        elif is_required or repr(_plain(value, key)) != repr(_plain(default, key)):  # repr: 1 is not True
            changed[key] = _plain(value, key)


def _section(config: Any, prefix: str) -> dict[str, Any]:
    cls: type = type(config)
    return {name: _plain(getattr(config, name), join(prefix, name)) for name in field_specs(cls)}


def _plain(value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _section(value, key)
    if isinstance(value, tuple | list):
        return [_plain(part, f"{key}[{i}]") for i, part in enumerate(value)]
    if isinstance(value, Mapping):
        return {name: _plain(part, join(key, name)) for name, part in value.items()}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConfigError(f"{key} holds a {type(value).__name__}, which a configuration file cannot hold")
