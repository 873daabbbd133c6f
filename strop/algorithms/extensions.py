"""Estimators and losses in files of the user's own: imported once per process, they register themselves."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

_LOADED: set[Path] = set()


def load_extensions(files: Iterable[str]) -> None:
    """Import Python files that register advantage estimators or policy losses; a file only the first time.

    Args:
        files: relative ones start at the current directory.

    Raises:
        ValueError: there is no such file, or importing it failed.
    """
    for name in files:
        path = Path(name).expanduser().resolve()
        if path in _LOADED:
            continue
        if not path.is_file():
            raise ValueError(
                f"algorithm.extensions names {name!r}, but {path} is no file; relative names start at the current "
                f"directory"
            )
        module_name = f"strop_extension_{len(_LOADED)}_{path.stem}"
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"algorithm.extensions names {name!r}, which is no Python file (.py)")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[module_name]
            raise ValueError(
                f"algorithm.extensions: {path} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        _LOADED.add(path)
