"""Python files of the user's own, imported once per process; what they define registers itself."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from strop.base.trust import ask

_LOADED: dict[Path, Any] = {}


def load_user_file(name: str, *, setting: str) -> Any:
    """Import a file; a second call gives the same module.

    Args:
        name: a path; a relative one starts at the current directory.
        setting: that names it, for messages.

    Raises:
        ValueError: there is no such file, or importing it failed.
        UntrustedCode: received settings name it.
    """
    ask(setting, name)
    path = Path(name).expanduser().resolve()
    if path in _LOADED:
        return _LOADED[path]
    if not path.is_file():
        raise ValueError(
            f"{setting} names {name!r}, but {path} is no file; relative names start at the current directory"
        )
    module_name = f"strop_user_file_{len(_LOADED)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{setting} names {name!r}, which is no Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # classes look their module up, for example to be pickled
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[module_name]
        raise ValueError(f"{setting}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    _LOADED[path] = module
    return module


def divide_named_file(section: Any, *, default: str = "") -> None:
    """Take a path FILE.py:NAME apart, in a section with path and name whose name is not given beside it.

    Args:
        section: a frozen dataclass, while it is made.
        default: its name where none is given.
    """
    file, colon, name = section.path.rpartition(":")
    if colon and file.endswith(".py") and name.isidentifier() and section.name in (default, name):
        object.__setattr__(section, "path", file)
        object.__setattr__(section, "name", name)


def absolute_path(path: str) -> str:
    """The whole path of a file; empty for none."""
    return str(Path(path).expanduser().absolute()) if path else ""


def is_loaded(name: str) -> bool:
    """Whether this process has imported the file by `load_user_file`."""
    return Path(name).expanduser().resolve() in _LOADED
