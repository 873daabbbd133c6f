"""Classes and YAML files named by the settings of tools, interactions and environments."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from strop.agents.tools.verl_class_names import equivalent_class
from strop.utils.safe_read import MAX_YAML_BYTES, parse_yaml, read_text
from strop.utils.trust import ask
from strop.utils.user_files import from_elsewhere, load_user_file

_searched: set[str] = set()
"""Folders of users' modules that were added to sys.path."""


def read_yaml(name: str, *, setting: str) -> Any:
    """The plain value of a YAML file.

    Args:
        name: a path; a relative one starts at the current directory.
        setting: that names it, for messages.

    Raises:
        ValueError: the sentence says why it cannot be read.
    """
    path = Path(name).expanduser().absolute()
    if not path.is_file():
        raise ValueError(
            f"{setting} names {name!r}, but {path} is no file; relative names start at the current directory"
        )
    try:
        return parse_yaml(read_text(path, limit=MAX_YAML_BYTES))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{setting} names {name!r}, which cannot be read: {reason}") from error


def load_class(name: str, *, setting: str, folder: Path | None = None) -> type:
    """The class of a name: FILE.py:CLASS, or a dotted path such as package.module.Name, perhaps of another library.

    Files and modules that are not installed are looked for in the folder, then in the current directory.

    Args:
        name: of the class.
        setting: that names it, for messages.
        folder: of the YAML file that names it.

    Raises:
        ValueError: there is none.
    """
    folders = [Path(directory).expanduser().resolve() for directory in (folder, ".") if directory is not None]
    file, colon, class_name = name.rpartition(":")
    if name.endswith(".py") or (colon and file.endswith(".py")):
        if not colon:
            raise ValueError(f"{setting} names the file {name!r}; name the class too: {name}:ClassName")
        ask(setting, name)
        path = _file(file, folders)
        if path is None:
            searched = " and ".join(dict.fromkeys(str(directory) for directory in folders))
            raise ValueError(f"{setting} names {name!r}, but there is no such file; looked in {searched}")
        return _class(load_user_file(str(path), setting=setting), class_name, name, setting)
    try:
        name = equivalent_class(name)
    except ValueError as error:
        raise ValueError(f"{setting} names {error}") from None
    module_name, _, class_name = name.rpartition(".")
    if not module_name:
        raise ValueError(
            f"{setting} names the class {name!r}; write package.module.ClassName or FILE.py:ClassName"
        )
    ask(setting, name)
    try:
        module = _module(module_name, folders)
    except Exception as error:  # whatever the user's module raises
        advice = from_elsewhere(error) or f"; a file of your own is named by its path, FILE.py:{class_name}"
        raise ValueError(
            f"{setting} names {name!r}, which cannot be imported: {type(error).__name__}: {error}{advice}"
        ) from error
    return _class(module, class_name, name, setting)


def _file(name: str, folders: Sequence[Path]) -> Path | None:
    path = Path(name).expanduser()
    return next((folder / path for folder in folders if (folder / path).is_file()), None)


def _class(module: Any, class_name: str, name: str, setting: str) -> type:
    """A class of a module.

    Raises:
        ValueError: it has none of this name.
    """
    value = getattr(module, class_name, None)
    if value is None:
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        own_classes = sorted(key for key in classes if getattr(module, key).__module__ == module.__name__)
        file = getattr(module, "__file__", module.__name__)
        raise ValueError(
            f"{setting} names {name!r}, but {file} has no class {class_name!r}; it has "
            f"{', '.join(own_classes) or 'none'}"
        )
    if not isinstance(value, type):
        raise ValueError(f"{setting} names {name!r}, which is no class but a {type(value).__name__}")
    return value


def _module(name: str, folders: Sequence[Path]) -> Any:
    """An installed module, or one that lies in a folder, which is searched for modules from then on.

    Raises:
        ImportError: there is none, or another one of its name was imported from another folder.
    """
    top = name.partition(".")[0]
    folder_of_module = next(
        (folder for folder in folders if (folder / top).is_dir() or (folder / f"{top}.py").is_file()), None
    )
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if folder_of_module is None or error.name != top:
            raise
        _searched.add(str(folder_of_module))
        sys.path.append(str(folder_of_module))
        return importlib.import_module(name)
    file = getattr(module, "__file__", None)
    imported_from = Path(file).parents[name.count(".")] if file else None
    if folder_of_module is not None and imported_from != folder_of_module and str(imported_from) in _searched:
        raise ImportError(f"another module {name} was imported from {imported_from} before")
    return module
