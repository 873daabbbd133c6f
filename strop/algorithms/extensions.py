"""Functions in files of the user's own: imported once per process, they register themselves."""

from __future__ import annotations

from collections.abc import Iterable

from strop.base.user_files import load_user_file


def load_extensions(files: Iterable[str]) -> None:
    """Import Python files that register estimators, losses, samplers, filters or shaping; each only the first time.

    Args:
        files: relative ones start at the current directory.

    Raises:
        ValueError: there is no such file, or importing it failed.
    """
    for name in files:
        load_user_file(name, setting="algorithm.extensions")
