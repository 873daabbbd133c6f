"""Rows of JSON and JSON-lines files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from strop.utils.safe_read import parse_json, read_text
from strop.utils.sanitize import encodable_value

MAX_FILE_BYTES = 2**36
"""Of a file of JSON that is held in memory: more than machines have."""
_MOST_LINES = 20
"""Of broken ones that are named."""


def read_json_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file: one object per line, or, of a `.json` file, also one list of objects.

    Raises:
        ValueError: it cannot be read, or holds something else; broken lines are named by their numbers.
    """
    try:
        text = read_text(path, limit=MAX_FILE_BYTES)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data file {path} is not UTF-8 text (byte {error.start}); save it as UTF-8, or give parquet "
            f"files the suffix .parquet"
        ) from error
    except OSError as error:
        raise ValueError(f"data file {path} cannot be read: {error.strerror}; check the path") from error
    if path.suffix == ".json" and text.lstrip().startswith("["):
        return _read_json_list(path, text)
    rows: list[dict[str, Any]] = []
    errors: dict[int, ValueError] = {}
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: U+2028 may stand in a string
        if line.strip():
            try:
                rows.append(parse_object(line, f"line {number} of {path}"))
            except ValueError as error:
                errors[number] = error
    if errors:
        first, *others = errors
        numbers = ", ".join(map(str, others[:_MOST_LINES]))
        more = f" and {len(others) - _MOST_LINES} more" if len(others) > _MOST_LINES else ""
        beside = f"; {len(others)} more lines are broken: {numbers}{more}" if others else ""
        raise ValueError(f"{errors[first]}{beside}") from errors[first]
    return rows


def _read_json_list(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        items = encodable_value(parse_json(text))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"data file {path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}; "
            f"fix that line"
        ) from error
    except ValueError as error:
        raise ValueError(f"data file {path} cannot be read as JSON: {error}") from error
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ValueError(_not_an_object(f"item {index} of {path}", item))
    return list(items)


def parse_object(line: str, where: str) -> dict[str, Any]:
    """The object of a line of JSON; `where` names it in errors."""
    try:
        item = encodable_value(parse_json(line))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is not valid JSON: {error.msg} at column {error.colno}; each line holds one object "
            f'such as {{"prompt": "...", ...}}'
        ) from error
    except ValueError as error:
        raise ValueError(f"{where} cannot be read as JSON: {error}") from error
    if not isinstance(item, dict):
        raise ValueError(_not_an_object(where, item))
    return item


def _not_an_object(where: str, item: object) -> str:
    return (
        f'{where} is a JSON {type(item).__name__}, not an object; each row is {{"column": value, ...}} with '
        f"the column names as keys"
    )
