"""Configuration files, presets and overrides into one checked object."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from strop.config.build import build_config
from strop.config.layers import Layers
from strop.config.overrides import parse_override
from strop.config.renamed import with_current_keys
from strop.config.sources import Layer, mapping_in, preset_layers, read_settings, source_layers

T = TypeVar("T")


def load_config(root: type[T], *, source: str | Path | None = None, overrides: Sequence[str] = ()) -> T:
    """The configuration of type `root` from a source, with overrides on top of it.

    Args:
        root: a frozen dataclass, whose fields may be dataclasses (sections).
        source, overrides: as for `load_layers`.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type or is out of bounds, or a check of a dataclass
            refuses it. What can be found in one pass is reported together.
    """
    return build_config(root, load_layers(root, source=source, overrides=overrides))


def load_layers(
    root: type,
    *,
    source: str | Path | None = None,
    text: str | None = None,
    overrides: Sequence[str] = (),
) -> Layers:
    """What a source and overrides give for the tree of `root`, and where each value comes from.

    Laid over each other, later ones winning: the defaults of the dataclasses; the presets that the file
    lists under `defaults:`; the file; presets named by overrides (`algorithm=dr_grpo` makes the section that
    preset, and forgets what the file set in it); the other overrides, in their order. File paths in values
    are relative to the current directory.

    Args:
        root: the dataclass at the top.
        source: a YAML file, or the name of a preset. None: the defaults alone.
        text: content of that file, where it was read before.
        overrides: in Hydra's grammar. `a.b=1` sets; `~a.b` goes back to the default; `+a.b.c=1` adds an entry
            to a free dict a.b, where the + may be left out.

    Raises:
        ConfigError: the source cannot be read. Other problems are in the result.
    """
    layers = Layers(root, source_layers(source, text) if source is not None else ())
    others = []
    for word in overrides:
        try:
            override = parse_override(word)
            names_preset = isinstance(override.value, str) and layers.is_section(override.key)
            if names_preset and override.kind == "set":
                layers.replace_section(override.key, preset_layers(override.key, override.value))
            else:
                others.append(override)
        except ValueError as error:
            layers.problems.append(str(error))
    for override in others:
        layers.apply(override)
    layers.refuse_interpolations()
    return layers


def read_config(root: type[T], path: str | Path, *, text: str | None = None) -> T:
    """The configuration that save_config wrote, equal to the object it was given.

    Args:
        root: its type.
        path: the file.
        text: content of that file, where it was read before.

    Raises:
        ConfigError: the file cannot be read, or is not one of `root`.
    """
    name = str(path)
    return config_of(root, mapping_in(read_settings(Path(path)) if text is None else text, name), name)


def config_of(root: type[T], values: dict[str, Any], place: str = "") -> T:
    """The configuration of nested plain values.

    Args:
        root: its type.
        values: nested, as `to_dict` gives them.
        place: where they were found, for errors.

    Raises:
        ConfigError: they are not those of a `root`.
    """
    return build_config(
        root, Layers(root, [Layer(section="", values=with_current_keys(values), origin=place)])
    )
