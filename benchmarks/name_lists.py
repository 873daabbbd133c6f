"""Options of benchmarks that name some of several cases."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def names_of(known: Collection[str], *, separator: str = ",") -> Callable[[str], list[str]]:
    """Type of an option with some of these names, refused before anything is measured where one is another."""

    def names(text: str) -> list[str]:
        chosen = text.split(separator)
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r}; choose from {', '.join(known)}")
        return chosen

    return names
