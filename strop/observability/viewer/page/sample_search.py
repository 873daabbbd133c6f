"""Samples by what they are: a run's files are read one after the other until enough is found or time is up."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.run.samples import SampleStore, schema_of
from strop.run.samples.reading import tables_of
from strop.utils.safe_read import parse_json
from strop.utils.sanitize import printable

if TYPE_CHECKING:
    import pyarrow as pa

_COLUMNS = (
    "id", "uid", "sample_index", "step", "data_source", "prompt", "response", "score", "outcome", "reward_parts",
    "advantage", "fate", "fate_reason", "stop_reason", "num_turns", "response_mask",
)  # fmt: skip
PREVIEW_CHARS = 280
_VISIT = re.compile(r"e\d+-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Query:
    """Search filters; None and empty texts match everything."""

    split: str = "train"
    first_step: int | None = None
    last_step: int | None = None
    text: str = ""
    """In the prompt or the answer, in letters of either case."""
    prompt: str = ""
    """Row of the data set, as the samples' ids have it: the same prompt over the training."""
    source: str = ""
    fate: str = ""
    stop: str = ""
    """stop, length or aborted."""
    lowest_score: float | None = None
    highest_score: float | None = None
    least_tokens: int | None = None
    most_tokens: int | None = None
    part: str = ""
    """A part of the reward that the sample has."""
    lowest_part: float | None = None
    highest_part: float | None = None
    oldest_first: bool = False

    @classmethod
    def of(cls, words: Mapping[str, str]) -> Query:
        """From the words of an address.

        Raises:
            ValueError: a word is no number where one is needed, or nothing is called so.
        """
        filters: dict[str, Any] = {}
        kinds = {field.name: str(field.type) for field in fields(cls)}
        for name, word in words.items():
            if name not in kinds:
                raise ValueError(f"samples are not looked for by {name!r}")
            if not word:
                continue
            try:
                filters[name] = _READERS[kinds[name]](word)
            except ValueError:
                raise ValueError(f"{name} is {word!r}, which is no number") from None
        return cls(**filters)


_READERS: dict[str, Any] = {
    "str": str,
    "int | None": int,
    "float | None": float,
    "bool": lambda word: word == "true",
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """Samples of one look."""

    rows: list[dict[str, Any]]
    goes_on_at: int | None
    """Step at which the next look begins; None where all were looked at."""
    num_steps: int
    """Steps that were looked at."""


def search(
    store: SampleStore, query: Query, *, start_at: int | None = None, limit: int = 50, budget_s: float = 0.7
) -> Found:
    """The next samples that match, whole steps at a time.

    Args:
        store: of the run.
        query: what is looked for.
        start_at: step to begin with; None: the newest, or the oldest.
        limit: no further step is read once so many are found.
        budget_s: the same, in seconds.
    """
    began = time.monotonic()
    files = store.files(split=query.split)
    low = query.first_step if query.first_step is not None else 0
    high = query.last_step if query.last_step is not None else max(files, default=0)
    steps = sorted((step for step in files if low <= step <= high), reverse=not query.oldest_first)
    if start_at is not None:
        steps = [step for step in steps if (step >= start_at if query.oldest_first else step <= start_at)]
    rows: list[dict[str, Any]] = []
    for count, step in enumerate(steps):
        if len(rows) >= limit or (count and time.monotonic() - began > budget_s):
            return Found(rows=rows, goes_on_at=step, num_steps=count)
        rows += matching_rows(files[step], query)
    return Found(rows=rows, goes_on_at=None, num_steps=len(steps))


def matching_rows(paths: list[Path], query: Query) -> list[dict[str, Any]]:
    """The samples of these files that match, in short."""
    return [_short(row) for table in _tables(paths) for row in _matching(table, query)]


def row_of(uid: str) -> str:
    """The row of the data set that a visit is of."""
    visit = _VISIT.fullmatch(uid)
    return visit[1] if visit else uid


def _tables(paths: list[Path]) -> Iterator[pa.Table]:
    for path in paths:
        yield from tables_of(path, schema_of(_COLUMNS))


def _matching(table: pa.Table, query: Query) -> list[dict[str, Any]]:
    import pyarrow.compute as pc

    tests = []
    for name, value in (("data_source", query.source), ("fate", query.fate), ("stop_reason", query.stop)):
        if value:
            tests.append(pc.equal(table[name], value))
    if query.lowest_score is not None:
        tests.append(pc.greater_equal(table["score"], query.lowest_score))
    if query.highest_score is not None:
        tests.append(pc.less_equal(table["score"], query.highest_score))
    lengths = pc.list_value_length(table["response_mask"])
    if query.least_tokens is not None:
        tests.append(pc.greater_equal(lengths, query.least_tokens))
    if query.most_tokens is not None:
        tests.append(pc.less_equal(lengths, query.most_tokens))
    if query.prompt:
        pattern = rf"^(e\d+-)?{re.escape(query.prompt)}$"
        tests.append(pc.match_substring_regex(table["uid"], pattern))
    if query.text:
        within = [
            pc.fill_null(pc.match_substring(table[name], query.text, ignore_case=True), False)
            for name in ("prompt", "response")
        ]
        tests.append(pc.or_(*within))
    table = table.append_column("num_tokens", lengths).drop_columns("response_mask")
    if tests:
        table = table.filter(functools.reduce(pc.and_, (pc.fill_null(test, False) for test in tests)))
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        row["reward_parts"] = parts_of(row["reward_parts"])
    return [row for row in rows if _has_part(row, query)]


def parts_of(text: str | None) -> dict[str, Any]:
    try:
        parts = parse_json(text) if text else {}
    except ValueError:
        return {}
    return parts if isinstance(parts, dict) else {}


def _has_part(row: Mapping[str, Any], query: Query) -> bool:
    if not query.part:
        return True
    value = row["reward_parts"].get(query.part)
    if query.lowest_part is None and query.highest_part is None:
        return value is not None
    if not isinstance(value, (int, float)):
        return False
    return (query.lowest_part is None or value >= query.lowest_part) and (
        query.highest_part is None or value <= query.highest_part
    )


def _short(row: dict[str, Any]) -> dict[str, Any]:
    for name in ("prompt", "response"):
        text = row[name] or ""
        row[name] = printable(text[:PREVIEW_CHARS]) + ("…" if len(text) > PREVIEW_CHARS else "")
    for name in ("id", "uid", "data_source", "fate_reason"):
        row[name] = None if row[name] is None else printable(row[name], is_one_line=True)
    row["row"] = row_of(row["uid"])
    row["reward_parts"] = {
        printable(str(name)): printable(value if isinstance(value, str) else json.dumps(value))[
            :PREVIEW_CHARS
        ]
        for name, value in row["reward_parts"].items()
    }
    return row
