"""Names of a package that are imported when they are first used, so that its light modules can be had alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping

from strop.base.guests import joined, targets


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package (PEP 562), which lists its own names in `__all__`.

    Names that guests offer there (their public names) are found as well.

    Args:
        package: its `__name__`.
        homes: its modules, full or below it (`.config`), and the names that each gives, in one string.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def offered() -> list[str]:
        of_guests = [full.rpartition(".") for full in targets("public name")]
        return sorted([*sys.modules[package].__all__, *(name for at, _, name in of_guests if at == package)])

    def find(name: str) -> object:
        if name in home_of:
            return getattr(importlib.import_module(home_of[name], package), name)
        if not name.startswith("_") and (full := f"{package}.{name}") in targets("public name"):
            return joined("public name", full)
        raise AttributeError(
            f"module {package!r} has no attribute {name!r}; it offers {', '.join(offered())}"
        )

    return find, offered
