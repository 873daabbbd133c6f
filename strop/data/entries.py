"""Entries of data.train_files and the like: which file or folder of this machine they mean, and whether it is there."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from strop.base.elsewhere import is_hub, is_url

SUFFIXES = (".parquet", ".jsonl", ".json")


def check_there(entries: Sequence[str | Path]) -> None:
    """Refuse entries that name a file or folder of this machine that is not there.

    Raises:
        FileNotFoundError: the sentence names the nearest of those that are.
    """
    for entry in map(str, entries):
        if not is_url(entry) and not is_hub(entry):
            path, _ = split_entry(entry)
            if not path.exists():
                raise FileNotFoundError(missing(path))


def split_entry(entry: str) -> tuple[Path, str]:
    """The folder and split of `FOLDER@split`; the path and "" of all else."""
    path = Path(entry).expanduser()
    head, at, split = entry.rpartition("@")
    if at and not path.exists() and split and "/" not in split and Path(head).expanduser().is_dir():
        return Path(head).expanduser(), split
    return path, ""


def missing(path: Path) -> str:
    """The sentence about a file that is not there."""
    text = f"data file {path} does not exist"
    if not path.is_absolute():
        text += f" (looked in {Path.cwd()})"
    folder = path.parent
    if not folder.is_dir():
        return f"{text}; nor does the folder {folder}: check the path"
    others = sorted(entry.name for entry in folder.iterdir() if entry.suffix in SUFFIXES)
    if near := difflib.get_close_matches(path.name, others, n=1):
        return f"{text}; did you mean {near[0]}? In that folder there are: {some_of(others)}"
    if others:
        return f"{text}; in that folder there are: {some_of(others)}"
    return f"{text}; check the path"


def some_of(names: Sequence[str], limit: int = 8) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
