"""Search in a corpus of one's own: an SQLite full-text index (FTS5), ranked by BM25, without any server.

The index is one file, built once by `strop data index` and read by every worker; nothing writes to it afterwards.
Results and arguments are those of retrieval servers of the field: a list of queries and topk in, numbered passages
out. Source of the ranking: Robertson and Zaragoza 2009, BM25 with k1 = 1.2 and b = 0.75, as FTS5 has it.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.agents.tools.base import BaseTool, ToolResponse
from strop.agents.tools.schemas import OpenAIFunctionToolSchema
from strop.agents.tools.threads import call_in_thread
from strop.foreign_files import check_regular, lines_of, open_regular, parse_json

MAX_QUERIES, MAX_TOPK, MAX_WORDS = 8, 50, 32
"""Per call: queries, passages of each, words of each query that are looked for."""
_WORD = re.compile(r"\w+")
_BATCH = 10_000

SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the corpus for passages.",
        "parameters": {
            "type": "object",
            "properties": {
                "query_list": {
                    "type": "array", "items": {"type": "string"}, "description": "What to search for, a query each.",
                }
            },
            "required": ["query_list"],
        },
    },
}  # fmt: skip


@dataclass(frozen=True)
class Passage:
    """A passage that was found."""

    id: str
    title: str
    text: str
    score: float
    """BM25; larger is better."""


def build_index(corpus: Path, index: Path) -> int:
    """Make the index of a corpus; returns the number of passages.

    Args:
        corpus: .jsonl or .parquet with a column contents (a first line in quotes is the title), or text and perhaps
            title; and perhaps id.
        index: file to write; an existing one is replaced when the whole new one is there.

    Raises:
        ValueError: the corpus is of no such form, or empty.
    """
    partial = index.with_name(index.name + ".partial")
    partial.unlink(missing_ok=True)
    connection = sqlite3.connect(partial)
    try:
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
    except BaseException:
        connection.close()
        partial.unlink(missing_ok=True)
        raise
    connection.close()
    if not count:
        partial.unlink()
        raise ValueError(f"the corpus {corpus} has no passages")
    partial.replace(index)
    return count


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

        What the query contains is words: operators of the index's language have no meaning in it.
        """
        words = _WORD.findall(query)[:MAX_WORDS]
        if not words:
            return []
        asked = " OR ".join(f'"{word}"' for word in dict.fromkeys(words))
        rows = self._connection().execute(
            "SELECT id, title, text, -bm25(passages) FROM passages WHERE passages MATCH ? "
            "ORDER BY bm25(passages), rowid LIMIT ?",
            (asked, topk),
        )
        return [Passage(*row) for row in rows]

    def _connection(self) -> sqlite3.Connection:
        if not hasattr(self._local, "connection"):
            self._local.connection = sqlite3.connect(
                f"{self._path.resolve().as_uri()}?mode=ro&immutable=1", uri=True, check_same_thread=False
            )
        connection: sqlite3.Connection = self._local.connection
        return connection


class SearchTool(BaseTool):
    """Search in a local index.

    config: `index`, the file; `corpus` builds it at first use where it is missing; `topk`, passages per query (3).
    """

    def __init__(
        self, config: Mapping[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config or {}, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        known = {"type", "index", "corpus", "topk"}
        if unknown := set(self.config) - known:
            raise ValueError(
                f"config has the unknown key {sorted(unknown)[0]!r}; a search tool has index, corpus and topk"
            )
        if not self.config.get("index"):
            raise ValueError("config has no index; name the file that `strop data index` made")
        index, corpus = Path(str(self.config["index"])).expanduser(), self.config.get("corpus")
        if not index.is_file() and corpus:
            build_index(Path(str(corpus)).expanduser(), index)
        self._index = SearchIndex(index)
        self._topk = int(self.config.get("topk", 3))
        if not 1 <= self._topk <= MAX_TOPK:
            raise ValueError(f"topk is {self._topk}; use 1 to {MAX_TOPK}")

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """As of BaseTool; one query may be given as `query`, and `topk` lowers or raises the number of passages."""
        queries = parameters.get("query_list", parameters.get("query"))
        queries = [queries] if isinstance(queries, str) else queries
        if not isinstance(queries, list) or not queries or not all(isinstance(one, str) for one in queries):
            return ToolResponse(text='Error: give "query_list", a list of texts.'), 0.0, {"num_passages": 0}
        topk = parameters.get("topk", self._topk)
        topk = min(max(topk, 1), MAX_TOPK) if isinstance(topk, int) else self._topk
        found = [await call_in_thread(self._index.search, query, topk) for query in queries[:MAX_QUERIES]]
        text = "\n---\n".join(shown(passages) for passages in found)
        if len(queries) > MAX_QUERIES:
            text += f"\n(only the first {MAX_QUERIES} queries were searched for)"
        return ToolResponse(text=text), 0.0, {"num_passages": sum(map(len, found))}


def shown(passages: Sequence[Passage]) -> str:
    """Passages as text, numbered from 1."""
    if not passages:
        return "No passage found."
    return "\n".join(
        f"Doc {number} (Title: {passage.title})\n{passage.text}"
        if passage.title
        else f"Doc {number}\n{passage.text}"
        for number, passage in enumerate(passages, start=1)
    )
