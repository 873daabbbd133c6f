"""Sources of a configuration: YAML files and the presets that ship with strop.

A YAML file may begin with `defaults:`, a list of presets that it builds on:

    defaults:
      - quickstart            # a whole configuration: presets/quickstart.yaml
      - algorithm: dr_grpo    # one section: presets/algorithm/dr_grpo.yaml
    algorithm:
      clip_ratio: 0.1         # the file's own keys come on top

The own keys come where `_self_` stands in the list; without it, on top. The folder of the file is a place of presets
too.

A preset of a section holds the keys of that section, and may have two more entries:

    outside: {reward: {overlong_buffer: 4096}}    # keys of other sections that belong to it
    left_open: [reward_keys]                      # keys of the section that it leaves to whoever uses it

A file path in a configuration is relative to the directory the command is started in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.config.errors import ConfigError
from strop.config.schema import join
from strop.config.yaml_text import parse
from strop.utils.field_types import nearest
from strop.utils.safe_read import MAX_YAML_BYTES, read_text
from strop.utils.sanitize import remember_secrets_in

PRESETS = Path(__file__).parent / "presets"
_SELF = ("", "_self_")
"""Entry of `defaults` that stands for the file's own keys."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Values for one section, or for the whole tree, from one place."""

    section: str
    """The full key of the section; "" for the whole tree."""
    values: dict[str, Any]
    """Nested, as read."""
    origin: str
    """Origin of the values, in words: a file's path, or `preset algorithm/grpo`."""
    preset: str = ""
    """The name of the preset that they belong to; "" for a file."""
    text: str = ""
    """Of the file, where they are from one."""
    left_open: tuple[str, ...] = ()
    """Full keys that the preset of a section leaves to whoever uses it."""


def preset_names(section: str = "") -> list[str]:
    """The names of the presets of a section; of the whole-configuration presets for ""."""
    return sorted(path.stem for path in PRESETS.joinpath(*section.split(".")).glob("*.yaml"))


def preset_sections() -> list[str]:
    """The sections that have presets."""
    return sorted(".".join(path.relative_to(PRESETS).parts) for path in PRESETS.rglob("*") if path.is_dir())


def preset_layers(section: str, name: str, *, above: tuple[str, ...] = ()) -> list[Layer]:
    """The layers of a preset, lowest first.

    Args:
        section: full key of the section that it is for; "" for the whole tree.
        name: of the preset.
        above: the presets whose defaults lead to it.

    Raises:
        ConfigError: there is no such preset.
    """
    label = f"preset {section.replace('.', '/')}/{name}" if section else f"preset {name}"
    if label in above:
        raise ConfigError(f"{' -> '.join((*above, label))}: the defaults of these presets form a circle")
    names = preset_names(section)
    if name not in names:
        raise ConfigError(_no_such_preset(section, name, names))
    values = read_mapping(PRESETS.joinpath(*section.split("."), f"{name}.yaml"), label)
    if not section:
        return layers_of(values, label, preset=name, above=(*above, label))
    if "defaults" in values:
        raise ConfigError(f"{label} is the preset of a section and cannot have defaults")
    outside = values.pop("outside", {})
    left_open = tuple(join(section, key) for key in values.pop("left_open", ()))
    layer = Layer(section=section, values=values, origin=label, preset=name, left_open=left_open)
    return [layer, Layer(section="", values=outside, origin=label, preset=name)]


def _no_such_preset(section: str, name: str, names: list[str]) -> str:
    if not section:
        return (
            f"there is neither a file nor a preset {name}; a file's path ends in .yaml, "
            f"and the presets are {', '.join(names) or '(none)'}"
        )
    if not names:
        return f"{section} is a section without presets, so {section}={name} says nothing; set a key below it"
    near = nearest(name, names)
    suggestion = f"; did you mean {near}?" if near else ""
    return f"{section} has no preset {name}; it has {', '.join(names)}{suggestion}"


def layers_of(
    values: dict[str, Any],
    label: str,
    *,
    section: str = "",
    text: str = "",
    preset: str = "",
    own: Callable[[str, str], list[Layer] | None] = lambda group, name: None,
    above: tuple[str, ...] = (),
) -> list[Layer]:
    """Layers of the `defaults` list of a file or preset, with its own values where `_self_` stands.

    Args:
        values: as read.
        label: what an error calls it.
        section: full key of the section that it is for; "" for the whole tree.
        text: of the file.
        preset: its name, where it is one.
        own: the layers of an entry of `defaults` that names a file of the user's; None for those that name a preset.
        above: the presets whose defaults lead to it.
    """
    if not section and "hydra" in values:
        raise ConfigError(
            f"{label} has a section hydra, which is about Hydra's own folders, logging and launchers: remove it; the "
            f"run folder is --out, several runs are `strop sweep`"
        )
    entries = _defaults(values.pop("defaults", []), label)
    itself = Layer(section=section, values=values, origin=label, text=text, preset=preset)
    layers = []
    for group, name in entries if _SELF in entries else [*entries, _SELF]:
        if (group, name) == _SELF:
            layers.append(itself)
            continue
        full = join(section, group) if group else section
        laid = own(group, name)
        layers.extend(preset_layers(full, name, above=above) if laid is None else laid)
    return layers


def read_mapping(path: Path, label: str) -> dict[str, Any]:
    """The mapping in a YAML file; `label` is what an error calls the file.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    return mapping_in(read_settings(path, label), label)


def read_settings(path: Path, label: str = "") -> str:
    """The text of a YAML file; `label` is what an error calls the file.

    Raises:
        ConfigError: the file cannot be read.
    """
    label = label or str(path)
    try:
        return read_text(path, limit=MAX_YAML_BYTES)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{label} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{label} cannot be read: {error.strerror}") from error


def mapping_in(text: str, label: str) -> dict[str, Any]:
    """The mapping in a YAML text; `label` is what an error calls it.

    Raises:
        ConfigError: it is no YAML, or holds something else.
    """
    try:
        values = parse(text, label)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{label} holds {values!r:.60}, but a configuration is a mapping of keys to values")
    remember_secrets_in(values)  # nothing that is said about them repeats one
    return values


def _defaults(entries: object, label: str) -> list[tuple[str, str]]:
    """The (group, name) pairs of a `defaults:` list; the group of a whole configuration is "", `_SELF` the own keys."""
    expected = "a list of names such as `- base` or `- algorithm: grpo`"
    if not isinstance(entries, list):
        raise ConfigError(f"{label}: defaults is {entries!r}, but it needs {expected}")
    pairs = []
    for entry in entries:
        if isinstance(entry, str):
            pairs.append(("", entry))
            continue
        match list(entry.items()) if isinstance(entry, dict) else []:
            case [(str(group), None)] if not _is_special(group):
                continue  # as in Hydra: none of them
            case [(str(group), str(name))] if not _is_special(group):
                pairs.append((group.removeprefix("/").replace("/", "."), name))
            case [(str(group), str() | None)]:
                raise ConfigError(
                    f"{label}: defaults has the entry {entry!r}, but override, optional and @package are not taken: "
                    f"write `- GROUP: NAME`, and leave out what there may not be"
                )
            case _:
                raise ConfigError(f"{label}: defaults has the entry {entry!r}, but it needs {expected}")
    return pairs


def _is_special(group: str) -> bool:
    return "@" in group or group.startswith(("override ", "optional "))
