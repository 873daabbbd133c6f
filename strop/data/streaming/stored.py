"""Rows that stay in their files and are read one by one, by number.

Memory use does not depend on the number of rows, except eight bytes per row of JSON lines, and those
are mapped from a file:

    parquet        written by `datasets` to data.cache_dir as Arrow, once, and mapped into memory
    JSON lines     by the offsets of lines, which are found once and kept in data.cache_dir; `datasets` would give
                   every row the keys of all, and read a null that was written as a key that is not there
    datasets       folders written by save_to_disk and sets of the hub, which are mapped into memory

Entries of the cache are named by path, size and time of change of the file, so a changed file is read again.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow
import pyarrow.parquet

from strop.data import folders
from strop.data.cache import cache_folder, use
from strop.data.json_rows import parse_object
from strop.data.readers import (
    check_entries,
    fetched,
    leaves,
    open_set,
    parquet_error,
    without_filled_nulls,
)
from strop.utils.remote_path import is_hub
from strop.utils.safe_read import MAX_LINE_BYTES, check_regular, lines_of, open_regular


class StoredRows(Sequence[dict[str, Any]]):
    """The rows of several files, one after another."""

    def __init__(self, parts: Sequence[RowPart]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = index % len(self)
        part = bisect.bisect_right(self._ends, number)
        return self._parts[part].row(number - (self._ends[part - 1] if part else 0))


def open_rows(files: Sequence[str | Path], cache_dir: str | Path = "") -> StoredRows:
    """The rows that `read_rows` would give, read when they are asked for.

    Args:
        files: entries of data.train_files.
        cache_dir: folder of fetched files and indexes; empty means the default.

    Raises:
        ValueError: as `read_rows`, as far as it shows without reading the rows; also for a `.json` file that holds
            one list, which has no rows that could be read alone.
        FileNotFoundError: a file does not exist.
    """
    check_entries(files)
    parts: list[RowPart] = []
    for entry in map(str, files):
        entry_parts = list(_parts(entry, cache_dir))
        if not sum(map(len, entry_parts)):
            raise ValueError(f"data file {entry} has no rows; write at least one, or leave the file out")
        parts += entry_parts
    return StoredRows(parts)


def _parts(entry: str, cache_dir: str | Path) -> Iterator[RowPart]:
    if is_hub(entry):
        yield MappedRows(open_set(entry))
        return
    for path in leaves(entry, cache_dir):
        with fetched(entry, path):
            if path.is_dir():
                yield MappedRows(folders.open_saved(path))
            elif path.suffix == ".parquet":
                yield _parquet_rows(path, cache_dir)
            else:
                yield LineRows(path, cache_dir)


class MappedRows:
    """Rows of a `datasets.Dataset`, which maps its files into memory."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset.with_format("arrow")  # media stay undecoded, as in read_rows

    def __len__(self) -> int:
        return len(self._dataset)

    def row(self, index: int) -> dict[str, Any]:
        """The row of this number."""
        rows: list[dict[str, Any]] = self._dataset[index : index + 1].to_pylist()
        return without_filled_nulls(rows[0])


class LineRows:
    """Rows of a JSON-lines file, found by the offsets of their lines."""

    def __init__(self, path: Path, cache_dir: str | Path) -> None:
        self._path = path
        try:
            self._file = open_regular(path)
        except OSError as error:
            raise ValueError(f"data file {path} cannot be read: {error.strerror}; check the path") from error
        if path.suffix == ".json" and _first_character(path) == b"[":
            raise ValueError(
                f"data file {path} holds one JSON list, so its rows cannot be read one by one: write one object per "
                f"line (.jsonl), or set data.streaming=false"
            )
        self._starts = np.load(_line_starts(path, cache_dir), mmap_mode="r")  # [rows]

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> dict[str, Any]:
        """The row of this number."""
        self._file.seek(int(self._starts[index]))
        line = self._file.readline(MAX_LINE_BYTES)
        where = f"row {index} of {self._path}"
        try:
            text = line.decode(
                "utf-8-sig" if index == 0 else "utf-8"
            )  # a mark of the byte order may come first
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
        return parse_object(text, where)


RowPart = MappedRows | LineRows
"""The rows of one file."""


def _parquet_rows(path: Path, cache_dir: str | Path) -> MappedRows:
    import datasets  # heavy, and only parquet files need it

    folder = _entry(path, "", cache_dir)
    try:
        check_regular(path)
        if not pyarrow.parquet.read_metadata(path).num_rows:  # which datasets does not read
            return MappedRows(datasets.Dataset.from_dict({}))
        rows = datasets.Dataset.from_parquet(str(path), cache_dir=str(folder))
    except (pyarrow.ArrowException, OSError, datasets.exceptions.DatasetGenerationError) as error:
        raise parquet_error(path, error) from error
    except ValueError as error:  # a type of Arrow's that it does not have
        raise ValueError(f"data file {path} has a column that cannot be streamed: {error}") from error
    use(folder)
    return MappedRows(rows)


def _line_starts(path: Path, cache_dir: str | Path) -> Path:
    """The file in the cache with the offsets of the lines of `path`, written when there is none."""
    target = _entry(path, ".npy", cache_dir)
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, staging = tempfile.mkstemp(prefix="writing-", suffix=".npy", dir=target.parent)
        os.close(handle)
        try:
            _write_starts(path, Path(staging))
            Path(staging).replace(target)
        finally:
            Path(staging).unlink(missing_ok=True)
    return use(target)


def _entry(path: Path, suffix: str, cache_dir: str | Path) -> Path:
    """The entry of the cache that belongs to the present contents of `path`."""
    stat = path.stat()
    name = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return cache_folder(cache_dir) / "rows" / f"{digest}{suffix}"


def _write_starts(path: Path, target: Path) -> None:
    """Write the byte offset of each line that is not blank."""
    starts = array("q")
    at = 0
    with open_regular(path) as file:
        for line in lines_of(file, path):
            if not line.isspace():
                starts.append(at)
            at += len(line)
    with target.open("wb") as file:
        np.save(file, np.frombuffer(starts, dtype=np.int64) if starts else np.zeros(0, dtype=np.int64))


def _first_character(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4096).lstrip()[:1]
