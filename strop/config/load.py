"""Configuration files, presets and overrides into one checked object."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from strop.config.build import build_config
from strop.config.errors import ConfigError
from strop.config.hydra_files import chosen_file, own_layers
from strop.config.layers import Layers
from strop.config.overrides import Override, parse_override
from strop.config.sources import (
    Layer,
    layers_of,
    mapping_in,
    preset_layers,
    preset_names,
    read_settings,
)
from strop.config.unknown_key import KeyAliases

T = TypeVar("T")


def load_config(
    root: type[T],
    *,
    source: str | Path | None = None,
    overrides: Sequence[str] = (),
    aliases: KeyAliases | None = None,
) -> T:
    """The configuration of type `root` from a source, with overrides on top of it.

    Args:
        root: a frozen dataclass, whose fields may be dataclasses (sections).
        source, overrides, aliases: as for `load_layers`.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type or is out of bounds, or a check of a dataclass
            refuses it. What can be found in one pass is reported together.
    """
    return build_config(root, load_layers(root, source=source, overrides=overrides, aliases=aliases))


def load_layers(
    root: type,
    *,
    source: str | Path | None = None,
    text: str | None = None,
    overrides: Sequence[str] = (),
    section: str = "",
    in_shell: bool = True,
    aliases: KeyAliases | None = None,
) -> Layers:
    """Values that a source and overrides give for the tree of `root`, each with its origin.

    Laid over each other, later ones winning: the defaults of the dataclasses; the presets that the file
    lists under `defaults:`; the file; presets named by overrides (`algorithm=dr_grpo` makes the section that
    preset, and forgets what the file set in it; algorithm/NAME.yaml beside the source is chosen alike); the other
    overrides, in their order. `${...}` is resolved at the end. File paths in values are relative to the current
    directory.

    Args:
        root: the dataclass at the top.
        source: a YAML file, or the name of a preset. None: the defaults alone.
        text: content of that file, where it was read before.
        overrides: in Hydra's grammar. `a.b=1` sets, and so do `+a.b=1` and `++a.b=1`, since every key is there; in a
            free dict a.b, `a.b.c=1` adds an entry; `~a.b` goes back to the default.
        section: of the command that reads the settings, whose keys are meant first where one is unknown.
        in_shell: the overrides were typed on a command line, not in a program; advice is for the place.
        aliases: keys of other libraries, for the message about an unknown key.

    Raises:
        ConfigError: the source cannot be read. Other problems are in the result.
    """
    sources = source_layers(source, text) if source is not None else ()
    layers = Layers(root, sources, section=section, in_shell=in_shell, aliases=aliases)
    folder = Path(source).parent if source is not None and text is None and Path(source).is_file() else None
    remaining = []
    for word in overrides:
        try:
            override = parse_override(word)
            if override.kind == "reset" or not _choose(layers, folder, override):
                remaining.append(override)
        except ValueError as error:
            layers.problems.append(str(error))
    for override in remaining:
        layers.apply(override)
    if text is None:
        layers.resolve()
    else:
        layers.refuse_interpolations()
    return layers


def source_layers(source: str | Path, text: str | None = None) -> list[Layer]:
    """The layers of a YAML file, or of a whole-configuration preset, lowest first.

    Args:
        source: the file, or the preset's name.
        text: content of that file, where it was read before; files beside it are not looked for then.

    Raises:
        ConfigError: there is no such file or preset, or it cannot be read.
    """
    path = Path(source)
    if text is not None:
        return layers_of(mapping_in(text, str(source)), str(source), text=text)
    if path.exists() and not path.is_dir():
        return own_layers(path)
    if isinstance(source, str) and path.suffix not in (".yaml", ".yml") and len(path.parts) == 1:
        return preset_layers("", source)
    inside = sorted(file.name for file in path.glob("*.y*ml"))[:3] if path.is_dir() else []
    has = f" that has {', '.join(inside)}" if inside else ""
    problem = f"is a directory{has}" if path.is_dir() else "does not exist"
    raise ConfigError(
        f"the configuration file {source} {problem}; give a YAML file, "
        f"or the name of a preset: {', '.join(preset_names()) or '(none)'}"
    )


def _choose(layers: Layers, folder: Path | None, override: Override) -> bool:
    """Apply an override that names a preset, or a file below the folder of the configuration; True if it does."""
    key, name = override.key, override.value
    if not isinstance(name, str) or "=" not in override.text:
        return False
    is_section = layers.is_section(key)
    laid = chosen_file(folder, key, name) if is_section or not layers.has(key) else None
    if is_section:
        layers.replace_section(key, preset_layers(key, name) if laid is None else laid)
    for layer in [] if is_section or laid is None else laid:
        layers.add(layer)
    return is_section or laid is not None


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
    text = read_settings(Path(path)) if text is None else text
    layer = Layer(section="", values=mapping_in(text, name), origin=name, text=text)
    return build_config(root, Layers(root, [layer]))


def config_of(root: type[T], values: dict[str, Any], place: str = "") -> T:
    """The configuration of nested plain values.

    Args:
        root: its type.
        values: nested, as `to_dict` gives them.
        place: where they were found, for errors.

    Raises:
        ConfigError: they are not those of a `root`.
    """
    return build_config(root, Layers(root, [Layer(section="", values=values, origin=place)]))
