"""Entries of data.cache_dir, within a bound.

    files/KEY/      what a URL named                        prompts/KEY.npz   token ids of large sets
    rows/KEY.npy    where the rows of a JSON-lines file begin
    rows/KEY/       a parquet file that is read by row      all of it can be made again

The time of change of an entry is the time of its last use. Entries are removed from the one that was not used for
longest; never one that this process uses, nor one that was used within the last hour, because another run may be
about to open it. prompts.py keeps token ids.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from strop.utils.hub.repo import size_of

KINDS = ("files", "prompts", "rows")
"""Folders of the cache, one for each kind of entry."""
GRACE_S = 3600.0
"""Age below which an entry may be in use by another run, in seconds."""

_in_use: set[Path] = set()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of the cache."""

    path: Path
    num_bytes: int
    used_at: float
    """Time of its last use, in seconds since the epoch."""


def cache_folder(cache_dir: str | Path) -> Path:
    """The folder that data.cache_dir means; empty is the default one."""
    return Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "strop"


def use(path: Path) -> Path:
    """Mark an entry as used by this process, which keeps it from being removed; returns the path."""
    _in_use.add(path.resolve())
    with suppress(OSError):  # the folder may be read-only, or shared with another user
        os.utime(path)
    return path


def entries(folder: Path) -> list[Entry]:
    """All entries of the cache, last used first."""
    cached = []
    for kind in KINDS:
        if not (folder / kind).is_dir():
            continue
        for path in (folder / kind).iterdir():
            try:
                cached.append(Entry(path=path, num_bytes=size_of(path), used_at=path.stat().st_mtime))
            except FileNotFoundError:  # another process removed it meanwhile
                continue
    return sorted(cached, key=lambda entry: (-entry.used_at, entry.path))


def prune(folder: Path, max_bytes: int, *, grace_s: float = GRACE_S) -> list[Entry]:
    """Remove the entries that were not used for longest until the rest takes at most `max_bytes`.

    Args:
        folder: of the cache.
        max_bytes: limit on the rest; entries in use stay in any case.
        grace_s: entries used within this time stay, in seconds.

    Returns:
        The removed ones.
    """
    cached = entries(folder)
    total = sum(entry.num_bytes for entry in cached)
    newest = time.time() - grace_s
    removed = []
    for entry in reversed(cached):
        if total <= max_bytes:
            break
        if entry.used_at > newest or entry.path.resolve() in _in_use:
            continue
        total -= entry.num_bytes
        removed.append(entry)
    remove(removed)
    return removed


def remove(removed: Iterable[Entry]) -> None:
    """Delete entries; one that is gone or belongs to another user is passed over."""
    for entry in removed:
        if entry.path.is_dir():
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with suppress(OSError):
                entry.path.unlink()
