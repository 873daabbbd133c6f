"""Rows from parquet, JSON lines, JSON, folders of them, folders written by `datasets`, the hub and URLs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from strop.data import folders
from strop.data.entries import SUFFIXES, missing, split_entry
from strop.data.json_rows import read_json_rows
from strop.utils.remote_path import is_hub, is_url
from strop.utils.safe_read import check_regular


def read_rows(files: Sequence[str | Path], cache_dir: str | Path = "") -> list[dict[str, Any]]:
    """All rows of the entries, in the order of the entries and of the rows in them.

    Relative paths start at the current directory. A `.json` file holds one list of objects, or one object
    per line like `.jsonl`. A folder is one that `datasets` wrote with `save_to_disk`, or holds files; where
    these belong to several splits, `FOLDER@split` says which. `hub:owner/name[:config][@split][#revision]` is a data
    set of the hub, and with `modelscope:` one of ModelScope. A URL of a file or folder is fetched once.

    Args:
        files: entries of data.train_files.
        cache_dir: folder of fetched files; empty means the default.

    Raises:
        ValueError: no file is named, an entry has no rows, an unknown suffix, or broken contents; a line of
            JSON is named by its number.
        FileNotFoundError: a file does not exist.
    """
    check_entries(files)
    rows: list[dict[str, Any]] = []
    for entry in map(str, files):
        entry_rows: list[dict[str, Any]] = []
        if is_hub(entry):
            entry_rows = [without_filled_nulls(row) for row in open_set(entry).to_list()]
        else:
            for path in leaves(entry, cache_dir):
                with fetched(entry, path):
                    if path.is_dir():
                        entry_rows += map(without_filled_nulls, folders.open_saved(path).to_list())
                    elif path.suffix == ".parquet":
                        entry_rows += map(without_filled_nulls, _parquet(path).to_pylist())
                    else:
                        entry_rows += read_json_rows(path)
        if not entry_rows:
            raise ValueError(f"data file {entry} has no rows; write at least one, or leave the file out")
        rows.extend(entry_rows)
    return rows


def without_filled_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of columns of one type, as of Arrow and parquet, without the nulls that they fill in: there every message,
    arguments of calls and tool schemas included, has the keys of all.

    Other columns stay as they are; so do texts, and rows of JSON lines, where a null was written.
    """
    return {
        name: _without_nulls(value) if name == "tools" or _is_chat(value) else value
        for name, value in row.items()
    }


def _is_chat(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and isinstance(value[0], Mapping)
        and "role" in value[0]
    )


def _without_nulls(value: object) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value]
    return value


def open_set(entry: str) -> Any:
    """The `datasets.Dataset` of a split of a hub's data set.

    Raises:
        ValueError: the entry has another form, or it cannot be had.
    """
    from strop.data.hub_rows import open_hub  # libraries of hubs: slow to import

    return open_hub(entry)


def check_entries(files: Sequence[str | Path]) -> None:
    """Raise for a list of entries that is none, or names nothing."""
    if isinstance(files, str | Path):
        raise TypeError(f"read_rows takes a list of files, got the single path {str(files)!r}; wrap it in []")
    if not files:
        raise ValueError("no data file was named; give a list of .parquet or .jsonl files")


def leaves(entry: str, cache_dir: str | Path) -> list[Path]:
    """Files of an entry other than those of hubs: files, and folders that `save_to_disk` wrote, in their order.

    Raises:
        ValueError: an unknown suffix, a folder with several splits, or a URL that cannot be fetched.
        FileNotFoundError: there is no such file.
    """
    if is_url(entry):
        from strop.data.hub_rows import fetch  # libraries of hubs: slow to import

        path = fetch(entry, SUFFIXES, cache_dir)
        with fetched(entry, path):
            return _leaves(path, "")
    path, split = split_entry(entry)
    if not path.exists():
        raise FileNotFoundError(missing(path))
    return _leaves(path, split)


@contextmanager
def fetched(entry: str, path: Path) -> Iterator[None]:
    """Errors about a copy name the URL that it was fetched from."""
    try:
        yield
    except ValueError as error:
        if not is_url(entry):
            raise
        raise ValueError(f"data entry {entry!r}, fetched to {path}: {error}") from error


def _leaves(path: Path, split: str) -> list[Path]:
    if path.is_dir():
        return folders.leaves(path, split)
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"data file {path} ends in {path.suffix or 'no suffix'!r}; use one of {', '.join(SUFFIXES)}, or "
            f"a folder with such files"
        )
    return [path]


def _parquet(path: Path) -> pyarrow.Table:
    try:
        check_regular(path)
        return pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise parquet_error(path, error) from error


def parquet_error(path: Path, error: Exception) -> ValueError:
    """Error for a file that pyarrow cannot read."""
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return ValueError(
        f"data file {path} cannot be read as parquet ({reason}); write it again, or check that it was copied whole"
    )
