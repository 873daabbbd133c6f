"""Rows from files: parquet, JSON lines, JSON, and dataset folders of Hugging Face `datasets`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

SUFFIXES = (".parquet", ".jsonl", ".json")


def read_rows(files: Sequence[str | Path]) -> list[dict[str, Any]]:
    """All rows of the files, in the order of the files and of the rows in them.

    Relative paths start at the current directory. A `.json` file holds one list of objects, or one object
    per line like `.jsonl`. A folder is one that `datasets` wrote with `save_to_disk`.

    Raises:
        ValueError: no file is named, a file has no rows, an unknown suffix, or broken contents; a line of
            JSON is named by its number.
        FileNotFoundError: a file does not exist.
    """
    if isinstance(files, str | Path):
        raise TypeError(f"read_rows takes a list of files, got the single path {str(files)!r}; wrap it in []")
    if not files:
        raise ValueError(
            "no data file was named; set data.train_files (or data.val_files) to a list of .parquet or "
            ".jsonl files"
        )
    rows: list[dict[str, Any]] = []
    for file in files:
        rows.extend(_read_file(Path(file).expanduser()))
    return rows


def _read_file(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise FileNotFoundError(_missing(path))
    if path.is_dir():
        rows = _read_folder(path)
    elif path.suffix == ".parquet":
        rows = _read_parquet(path)
    elif path.suffix in (".jsonl", ".json"):
        rows = _read_json(path)
    else:
        raise ValueError(
            f"data file {path} ends in {path.suffix or 'no suffix'!r}; use one of {', '.join(SUFFIXES)}, or "
            f"a folder written by datasets' save_to_disk"
        )
    if not rows:
        raise ValueError(f"data file {path} has no rows; write at least one, or leave the file out")
    return rows


def _missing(path: Path) -> str:
    text = f"data file {path} does not exist"
    if not path.is_absolute():
        text += f" (looked in {Path.cwd()})"
    folder = path.parent
    if not folder.is_dir():
        return f"{text}; nor does the folder {folder}: check the path"
    others = sorted(entry.name for entry in folder.iterdir() if entry.suffix in SUFFIXES)
    if others:
        return f"{text}; in that folder there are: {_some(others)}"
    return f"{text}; check the path"


def _some(names: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"data file {path} cannot be read as parquet ({reason}); write it again, or check that it was "
            f"copied whole"
        ) from error
    return rows


def _read_json(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data file {path} is not UTF-8 text (byte {error.start}); save it as UTF-8, or give parquet "
            f"files the suffix .parquet"
        ) from error
    if path.suffix == ".json" and text.lstrip().startswith("["):
        return _read_json_list(path, text)
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: U+2028 may stand in a string
        if line.strip():
            rows.append(_parse_object(line, f"line {number} of {path}"))
    return rows


def _read_json_list(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"data file {path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}; "
            f"fix that line"
        ) from error
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise ValueError(_not_an_object(f"item {index} of {path}", item))
    return list(items)


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is not valid JSON: {error.msg} at column {error.colno}; each line holds one object "
            f'such as {{"prompt": "...", ...}}'
        ) from error
    if not isinstance(item, dict):
        raise ValueError(_not_an_object(where, item))
    return item


def _not_an_object(where: str, item: object) -> str:
    return (
        f'{where} is a JSON {type(item).__name__}, not an object; each row is {{"column": value, ...}} with '
        f"the column names as keys"
    )


def _read_folder(path: Path) -> list[dict[str, Any]]:
    if (path / "dataset_dict.json").exists():
        splits = _parse_object((path / "dataset_dict.json").read_text("utf-8"), f"{path}/dataset_dict.json")
        names = [str(name) for name in splits.get("splits", [])]
        example = path / names[0] if names else path
        raise ValueError(
            f"data folder {path} is a dataset with the splits {', '.join(names)}; name one of them, for "
            f"example {example}"
        )
    if not (path / "state.json").exists():
        files = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.suffix in SUFFIXES)
        found = f"it holds {_some(files)}: name those files" if files else "name a .parquet or .jsonl file"
        raise ValueError(f"data folder {path} was not written by datasets' save_to_disk; {found}")
    import datasets  # heavy, and only folders need it

    try:
        rows: list[dict[str, Any]] = datasets.load_from_disk(str(path)).to_list()
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise ValueError(
            f"data folder {path} cannot be read by datasets ({type(error).__name__}: {error}); save it again "
            f"with save_to_disk"
        ) from error
    return rows
