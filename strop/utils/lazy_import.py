"""Names of a package that are imported when they are first used, so that its light modules can be had alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package (PEP 562), which lists its names in `__all__`.

    Args:
        package: its `__name__`.
        homes: its modules, full or below it (`.config`), and the names that each gives, in one string.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def offered() -> list[str]:
        return sorted(sys.modules[package].__all__)

    def find(name: str) -> object:
        if name in home_of:
            return getattr(importlib.import_module(home_of[name], package), name)
        raise AttributeError(
            f"module {package!r} has no attribute {name!r}; it offers {', '.join(offered())}"
        )

    return find, offered
