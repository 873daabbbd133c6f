"""What files of tools, interactions and environments name: classes, in YAML."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from strop.base.foreign_files import MAX_YAML_BYTES, parse_yaml, read_text
from strop.base.guests import all_joined
from strop.base.trust import ask


def read_yaml(path: Path | str) -> Any:
    """The plain value of a YAML file.

    Raises:
        ValueError, yaml.YAMLError: as `parse_yaml`, or it is no UTF-8.
        OSError: as `read_bytes`.
    """
    return parse_yaml(read_text(path, limit=MAX_YAML_BYTES))


def load_class(dotted: str, *, setting: str) -> type:
    """The class of a dotted path such as package.module.Name, or what stands for one of another library.

    Raises:
        ValueError: there is none.
    """
    try:
        for translate in all_joined("class translation").values():
            dotted = translate(dotted)
    except ValueError as error:
        raise ValueError(f"{setting} names {error}") from None
    module_name, _, name = dotted.rpartition(".")
    if not module_name:
        raise ValueError(f"{setting} names the class {dotted!r}; write package.module.ClassName")
    ask(setting, dotted)
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{setting} names {dotted!r}, which cannot be imported: {error}") from error
    if not isinstance(found, type):
        raise ValueError(f"{setting} names {dotted!r}, which is no class but a {type(found).__name__}")
    return found
