"""Entries of data.train_files and the like: which file or folder of this machine they mean, and whether it is there."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from strop.utils.remote_path import is_hub, is_url

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
    if near := _nearest(path, others):
        return f"{text}; did you mean {near}? In that folder there are: {list_some(others)}"
    if others:
        return f"{text}; in that folder there are: {list_some(others)}"
    return f"{text}; check the path"


def _nearest(path: Path, others: Sequence[str]) -> str | None:
    """The file of the nearest name. Its end is compared only where the rest leaves a choice: all files of a folder may
    have the same."""
    stems = difflib.get_close_matches(path.stem, {Path(name).stem for name in others}, n=1)
    same = [name for name in others if Path(name).stem in stems]
    return max(same, key=lambda name: difflib.SequenceMatcher(None, path.name, name).ratio(), default=None)


def list_some(names: Sequence[str], limit: int = 8) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
