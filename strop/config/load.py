"""Configuration files, presets and overrides into one checked object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from strop.config.build import build_config
from strop.config.errors import ConfigError
from strop.config.layers import Layers
from strop.config.overrides import Override, parse_override
from strop.config.schema import tree
from strop.config.sources import Layer, mapping_in, preset_layers, read_mapping, source_layers

T = TypeVar("T")


def load_config(
    root: type[T],
    *,
    source: str | Path | None = None,
    text: str | None = None,
    overrides: Sequence[str] = (),
) -> T:
    """The configuration of type `root` from a source, with overrides on top of it.

    Laid over each other, later ones winning: the defaults of the dataclasses; the presets that the file
    lists under `defaults:`; the file; presets named by overrides (`algorithm=dr_grpo` makes the section that
    preset, and forgets what the file set in it); the other overrides, in their order. File paths in values
    are relative to the current directory.

    Args:
        root: a frozen dataclass, whose fields may be dataclasses (sections).
        source: a YAML file, or the name of a preset. None: the defaults alone.
        text: content of that file, where it was read before.
        overrides: in Hydra's grammar. `a.b=1` sets; `~a.b` goes back to the default; `+a.b.c=1` adds an entry
            to a free dict a.b, where the + may be left out.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type or is missing, or a check of a dataclass
            refuses it. What can be found in one pass is reported together.
    """
    return load_with_origins(root, source=source, text=text, overrides=overrides)[0]


def load_with_origins(
    root: type[T],
    *,
    source: str | Path | None = None,
    text: str | None = None,
    overrides: Sequence[str] = (),
) -> tuple[T, Callable[[str], str]]:
    """As `load_config`, with a function from a full key to where its value comes from: `default`, `preset
    algorithm/dapo`, `file my.yaml` or `command line`."""
    layers = Layers(root, source_layers(source, text) if source is not None else ())
    presets, others = _parse(overrides, layers)
    for override in presets:
        try:
            layers.replace_section(override.key, preset_layers(override.key, override.value))
        except ConfigError as error:
            layers.problems.append(str(error))
    for override in others:
        layers.apply(override)
    layers.problems += _interpolations(layers)
    config = build_config(root, layers.values, origin=layers.origin, problems=layers.problems)
    return config, layers.source_of


def _interpolations(layers: Layers) -> Iterator[str]:
    for key, value in layers.values.items():
        texts = value if isinstance(value, list) else [value]
        is_meant = tree(layers.root)[key].is_free
        if not is_meant and any(isinstance(text, str) and "${" in text for text in texts):
            where = layers.origin(key)
            yield f"{key} is {value!r}{where}, but ${{...}} is not resolved: write the value itself"


def named_presets(
    root: type, *, source: str | Path | None = None, overrides: Sequence[str] = ()
) -> dict[str, str]:
    """The presets of sections that a source and overrides name: full key of the section to the preset's name.

    Raises:
        ConfigError: the source, or one of its presets, cannot be read.
    """
    layers = source_layers(source) if source is not None else []
    named = {layer.section: layer.preset for layer in layers if layer.section}
    presets, _ = _parse(overrides, Layers(root))
    return named | {override.key: override.value for override in presets}


def read_config(root: type[T], path: str | Path, *, text: str | None = None) -> T:
    """The configuration that save_config wrote, equal to the object it was given.

    Args:
        root: its type.
        path: the file.
        text: content of that file, where it was read before.

    Raises:
        ConfigError: the file cannot be read, or is not one of `root`.
    """
    values = read_mapping(Path(path), str(path)) if text is None else mapping_in(text, str(path))
    return config_of(root, values, str(path))


def config_of(root: type[T], values: dict[str, Any], place: str = "") -> T:
    """The configuration of nested plain values.

    Args:
        root: its type.
        values: nested, as `to_dict` gives them.
        place: where they were found, for errors.

    Raises:
        ConfigError: they are not those of a `root`.
    """
    layers = Layers(root, [Layer(section="", values=values, origin=place)])
    return build_config(root, layers.values, origin=layers.origin, problems=layers.problems)


def _parse(overrides: Sequence[str], layers: Layers) -> tuple[list[Override], list[Override]]:
    """The overrides that name a preset of a section, and the others; unreadable ones become problems."""
    presets: list[Override] = []
    others: list[Override] = []
    for text in overrides:
        try:
            override = parse_override(text)
        except ValueError as error:
            layers.problems.append(str(error))
            continue
        names_preset = isinstance(override.value, str) and layers.is_section(override.key)
        (presets if names_preset and override.kind == "set" else others).append(override)
    return presets, others
