"""Differences between a configuration and the preset that it names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from strop.config.layers import Layers
from strop.config.load import load_layers
from strop.config.save import to_flat_dict
from strop.config.sources import preset_layers


def preset_deviations(config: object, name: str, *, section: str = "algorithm") -> list[str]:
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
    layers = preset_layers(section, name)
    open_keys = tuple(f"{key}." for layer in layers for key in layer.left_open)
    defaults = to_flat_dict(type(config)())
    expected = {key: value for key, value in defaults.items() if key.startswith(f"{section}.")}
    expected |= Layers(type(config), layers).values
    actual = to_flat_dict(config)
    return [
        f"{key} is {json.dumps(actual[key])}; the preset {section}={name} has {json.dumps(value)}"
        for key, value in expected.items()
        if actual[key] != value and not f"{key}.".startswith(open_keys)
    ]


def deviations(
    config: object, *, source: str | Path | None = None, overrides: Sequence[str] = ()
) -> list[str]:
    """`preset_deviations` from every preset that the source and the overrides of a command line name."""
    presets = load_layers(type(config), source=source, overrides=overrides).presets
    return [
        sentence
        for section, name in presets.items()
        for sentence in preset_deviations(config, name, section=section)
    ]
