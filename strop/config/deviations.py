"""Where a configuration leaves the preset that it names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.config.describe import describe
from strop.config.layers import Layers
from strop.config.load import named_presets
from strop.config.save import to_dict
from strop.config.schema import field_specs, join
from strop.config.sources import preset_layers


def preset_deviations(config: Any, name: str, *, section: str = "algorithm") -> list[str]:
    """One sentence per key of which `config` has another value than the preset `name` of a section.

    Compared are all keys of the section, where the preset is silent with their defaults, and the keys of other
    sections that the preset sets. Keys that the preset leaves open are not compared.

    Args:
        config: the configuration in force.
        name: of the preset.
        section: full key of the section.

    Raises:
        ConfigError: there is no such preset.
    """
    root = type(config)
    below = f"{section}."
    layers = preset_layers(section, name)
    laid = Layers(root)
    for layer in layers:
        laid.add(layer)
    open_keys = tuple(key for layer in layers for key in layer.left_open)
    wanted = {doc.key: doc.default for doc in describe(root) if doc.key.startswith(below)}
    wanted |= dict(flat(root, laid.values))
    actual = dict(flat(root, to_dict(config)))
    return [
        f"{key} is {json.dumps(actual.get(key))}; the preset {section}={name} has {json.dumps(value)}"
        for key, value in wanted.items()
        if actual.get(key) != value and not _is_open(key, open_keys)
    ]


def deviations(config: Any, *, source: str | Path | None = None, overrides: Sequence[str] = ()) -> list[str]:
    """`preset_deviations` from every preset that the source and the overrides of a command line name."""
    named = named_presets(type(config), source=source, overrides=overrides)
    return [
        sentence
        for section, name in named.items()
        for sentence in preset_deviations(config, name, section=section)
    ]


def flat(cls: type, values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Full keys and values of nested values; a free dict is one value."""
    for name, value in values.items():
        key, spec = join(prefix, name), field_specs(cls).get(name)
        if spec is not None and spec.section is not None and isinstance(value, Mapping):
            yield from flat(spec.section, value, key)
        else:
            yield key, value


def _is_open(key: str, open_keys: Sequence[str]) -> bool:
    return any(key == known or key.startswith(f"{known}.") for known in open_keys)
