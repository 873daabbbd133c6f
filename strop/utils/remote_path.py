"""Names of what does not lie on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_URL = re.compile(r"[a-z][a-z0-9+.-]+(::[a-z][a-z0-9+.-]+)*://", re.IGNORECASE)
HUBS = ("hub:", "modelscope:")
"""Prefixes of entries that name a data set of a hub: the one of Hugging Face, and ModelScope."""


def is_url(text: str) -> bool:
    """True for a URL of whatever kind."""
    return _URL.match(text) is not None


def is_hub(entry: str) -> bool:
    """True where an entry of data.train_files names a data set of a hub."""
    return entry.startswith(HUBS)


def fetched(files: Iterable[str]) -> list[str]:
    """The entries of data.train_files, or of another such setting, that are fetched from elsewhere."""
    return [entry for entry in files if is_url(entry) or is_hub(entry)]


def folder_here(text: str) -> str:
    """The folder of this machine that the name of a model means, which always wins; empty where there is none."""
    folder = Path(text).expanduser()
    if not folder.is_dir():
        return ""
    return text if Path(text).is_dir() else str(folder)
