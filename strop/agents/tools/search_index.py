"""Full-text index of a corpus in one file: SQLite (FTS5), ranked by BM25.

It is built once, under a lock, by `strop data index` or by the first of the workers that need it; the others wait for
it. The whole file appears at once, so a build that crashed leaves nothing that could be read. Nothing
writes to it afterwards. Source of the ranking: Robertson and Zaragoza 2009, BM25 with k1 = 1.2 and b = 0.75, as FTS5
has it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.utils.atomic_io import fsync_path
from strop.utils.safe_read import check_regular, lines_of, open_regular, parse_json

MAX_WORDS = 32
"""Words of a query that are looked for."""
BUILD_S = 3600.0
"""Longest wait for another process that builds the same index, in seconds."""
_POLL_S = 0.1
_WORD = re.compile(r"\w+")
_BATCH = 10_000


@dataclass(frozen=True)
class Passage:
    """A passage that was found."""

    id: str
    title: str
    text: str
    score: float
    """BM25; larger is better."""


def build_index(corpus: Path, index: Path, *, only_if_missing: bool = False) -> int:
    """Make the index of a corpus; returns the number of passages.

    Args:
        corpus: .jsonl or .parquet with a column contents (a first line in quotes is the title), or text and perhaps
            title; and perhaps id.
        index: file to write; an existing one is replaced when the whole new one is there.
        only_if_missing: leave an existing one as it is, also one that another process has made meanwhile; 0 then.

    Raises:
        ValueError: the corpus is of no such form, or empty; or the index cannot be written.
    """
    try:
        with _build_lock(index):
            if only_if_missing and index.is_file():
                return 0
            partial = index.with_name(index.name + ".partial")
            _remove(partial)  # of a build that crashed
            try:
                count = _write(partial, corpus)
                fsync_path(partial)
                partial.replace(index)
            except BaseException:
                _remove(partial)
                raise
            return count
    except (OSError, sqlite3.Error) as error:
        raise ValueError(f"the search index {index} cannot be made of {corpus}: {error}") from error


@contextlib.contextmanager
def _build_lock(index: Path) -> Iterator[None]:
    """Lock of the process that builds this index; the lock ends with the process, and its file with the build."""
    path = index.with_name(index.name + ".lock")
    deadline = time.monotonic() + BUILD_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        except FileNotFoundError:
            pass  # removed between the two looks by the process that held it
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise ValueError(
                    f"another process has built the search index {index} for more than {BUILD_S:g} s; end it, or make "
                    f"the index with `strop data index`"
                ) from None
            time.sleep(_POLL_S)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
    try:
        yield
    finally:
        path.unlink(
            missing_ok=True
        )  # still held: whoever waits for this file finds it gone, and makes another
        os.close(descriptor)


def _write(partial: Path, corpus: Path) -> int:
    with contextlib.closing(sqlite3.connect(partial)) as connection:
        connection.execute(
            "CREATE VIRTUAL TABLE passages USING fts5(id UNINDEXED, title, text, tokenize='porter unicode61')"
        )
        count, batch = 0, []
        for passage in read_corpus(corpus):
            batch.append(passage)
            count += 1
            if len(batch) == _BATCH:
                connection.executemany("INSERT INTO passages VALUES (?, ?, ?)", batch)
                batch = []
        connection.executemany("INSERT INTO passages VALUES (?, ?, ?)", batch)
        connection.execute("INSERT INTO passages(passages) VALUES ('optimize')")
        connection.commit()
    if not count:
        raise ValueError(f"the corpus {corpus} has no passages")
    return count


def _remove(partial: Path) -> None:
    for path in (partial, partial.with_name(partial.name + "-journal")):
        path.unlink(missing_ok=True)


def read_corpus(path: Path) -> Iterator[tuple[str, str, str]]:
    """Id, title and text of each passage.

    Raises:
        ValueError: a row has no text.
    """
    for number, row in enumerate(_read_rows(path)):
        title, text = row.get("title"), row.get("text")
        contents = row.get("contents")
        if text is None and isinstance(contents, str):
            head, newline, rest = contents.partition("\n")
            title, text = (head.strip().strip('"'), rest) if newline else (title, contents)
        if not isinstance(text, str):
            raise ValueError(f"passage {number} of {path} has no text; give a column contents, or text")
        yield str(row.get("id", number)), str(title or ""), text


def _read_rows(path: Path) -> Iterable[Mapping[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet

        check_regular(path)
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    elif path.suffix in (".jsonl", ".json"):
        with open_regular(path) as file:
            for number, line in enumerate(lines_of(file, path), start=1):
                if line.strip():
                    try:
                        row = parse_json(line)
                    except ValueError as error:
                        raise ValueError(f"line {number} of {path} is no JSON: {error}") from None
                    if not isinstance(row, dict):
                        raise ValueError(f"line {number} of {path} is no JSON object")
                    yield row
    else:
        raise ValueError(f"the corpus {path} is neither .jsonl nor .parquet")


class SearchIndex:
    """An index, read by any number of threads."""

    def __init__(self, path: Path) -> None:
        """Args:
        path: of the file.

        Raises:
            ValueError: it is no index.
        """
        if not path.is_file():
            raise ValueError(
                f"there is no search index {path}; make it with `strop data index CORPUS -o {path}`"
            )
        self._path = path
        self._local = threading.local()
        try:
            self._connection().execute("SELECT count(*) FROM passages LIMIT 1").fetchone()
        except sqlite3.Error as error:
            raise ValueError(f"{path} is no search index: {error}; make it with `strop data index`") from None

    def search(self, query: str, topk: int) -> list[Passage]:
        """The best passages for the words of a query; a passage needs one of them.

        The query is taken as words: operators of the index's language have no meaning in it.
        """
        words = _WORD.findall(query)[:MAX_WORDS]
        if not words:
            return []
        match_query = " OR ".join(f'"{word}"' for word in dict.fromkeys(words))
        rows = self._connection().execute(
            "SELECT id, title, text, -bm25(passages) FROM passages WHERE passages MATCH ? "
            "ORDER BY bm25(passages), rowid LIMIT ?",
            (match_query, topk),
        )
        return [Passage(*row) for row in rows]

    def _connection(self) -> sqlite3.Connection:
        if not hasattr(self._local, "connection"):
            self._local.connection = sqlite3.connect(
                f"{self._path.resolve().as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False
            )
        connection: sqlite3.Connection = self._local.connection
        return connection
