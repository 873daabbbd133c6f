"""Files beside a configuration, as in Hydra: its folder is a place of presets.

`- base` under `defaults:` is base.yaml beside the file, `- algorithm: mine` is algorithm/mine.yaml, with the keys of
that section, or of the whole tree where its first line is `# @package _global_`; `algorithm=mine` chooses it too.
"""

from __future__ import annotations

import re
from pathlib import Path

from strop.config.errors import ConfigError
from strop.config.schema import join
from strop.config.sources import Layer, layers_of, mapping_in, preset_names, read_settings

_PACKAGE = re.compile(r"\s*#\s*@package\s+(\S+)")


def own_layers(path: Path, section: str = "", *, above: tuple[str, ...] = ()) -> list[Layer]:
    """The layers of a YAML file of the user's, lowest first.

    Args:
        path: of the file.
        section: full key of the section that it is for; "" for the whole tree.
        above: the files and presets whose defaults lead to it.

    Raises:
        ConfigError: it cannot be read.
    """
    label = str(path)
    if label in above:
        raise ConfigError(f"{' -> '.join((*above, label))}: the defaults of these files form a circle")
    text = read_settings(path, label)
    if match := _PACKAGE.match(text):
        if match[1] not in ("_global_", "_group_"):
            raise ConfigError(
                f"{label} begins with `# @package {match[1]}`; here a file of a folder is for the section of the "
                f"folder's name, or with `# @package _global_` for the whole configuration"
            )
        section = "" if match[1] == "_global_" else section
    above = (*above, label)

    def of_entry(group: str, name: str) -> list[Layer] | None:
        full = join(section, group) if group else section
        file = own_file(path.parent, group, name)
        if file is None:
            return None
        if name in preset_names(full):
            raise ConfigError(
                f"{label}: `{name}` under defaults is both the file {file} and a preset that comes with strop: give "
                f"the file another name"
            )
        return own_layers(file, full, above=above)

    return layers_of(mapping_in(text, label), label, section=section, text=text, own=of_entry, above=above)


def own_file(folder: Path | None, group: str, name: str) -> Path | None:
    """The file of a `defaults` entry, or of GROUP=NAME, below the folder of a configuration; None where there is none.

    Args:
        folder: of the configuration file.
        group: with dots or slashes; "" for none.
        name: with or without .yaml.
    """
    if folder is None or not name:
        return None
    path = folder.joinpath(*group.replace(".", "/").split("/"), name)
    options = (path,) if path.suffix in (".yaml", ".yml") else (Path(f"{path}.yaml"), Path(f"{path}.yml"))
    return next((option for option in options if option.is_file()), None)


def chosen_file(folder: Path | None, group: str, name: str) -> list[Layer] | None:
    """The layers of the file that GROUP=NAME names; None where there is none.

    Args:
        folder: of the configuration file, if there is one.
        group: the key.
        name: its value.

    Raises:
        ValueError: there is a preset of that name too.
        ConfigError: the file cannot be read.
    """
    file = own_file(folder, group, name)
    if file is None:
        return None
    if name in preset_names(group):
        raise ValueError(f"{group}={name} is both the file {file} and a preset: give the file another name")
    return own_layers(file, group)
