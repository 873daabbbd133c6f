"""The sample store: one Parquet file per step, or one of each rollout worker.

Every column has one type in every file, so any reader of Parquet (DuckDB, pandas, a notebook) opens the
folder as one table. Workers write their own files, so that no process handles all samples of a step.
pyarrow is imported where it is used: processes without samples start without it.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from strop.run.errors import RunError
from strop.run.samples.columns import COLUMNS, GROUP_ROWS, MAPPINGS, REQUIRED, is_message, schema_of
from strop.run.samples.reading import read_file
from strop.utils.atomic_io import fsync_path
from strop.utils.sanitize import storable, storable_text
from strop.utils.sanitize.text import MAX_CHARS
from strop.utils.sanitize.values import MAX_ITEMS

if TYPE_CHECKING:
    import pyarrow as pa

_INT32 = 1 << 31
_MAX_FILE_CHARS = 1 << 28
"""Limit of all texts of one file, which readers hold in memory."""
_FILE = re.compile(
    r"(?P<split>[a-z]+)?-?step-(?P<step>\d{6,9})(-(?P<part>\d{5})-of-(?P<parts>\d{5}))?\.parquet",
    re.ASCII,
)
_SPLIT = re.compile(r"[a-z]+")


class SampleStore:
    """Rows of samples by step, in one folder. A step that is written again replaces its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int, *, split: str = "train", part: int = 0, parts: int = 1) -> Path:
        """File of a step: `step-000012.parquet`, or `val-step-000012.parquet` for another split.

        One of several writers has `step-000012-00000-of-00002.parquet`.
        """
        if not _SPLIT.fullmatch(split):
            raise ValueError(f"split {split!r} becomes part of a file name; use lower-case letters only")
        if not 0 <= part < parts:
            raise ValueError(f"part {part} of {parts} does not exist; parts are counted from 0")
        prefix = "" if split == "train" else f"{split}-"
        suffix = "" if parts == 1 else f"-{part:05d}-of-{parts:05d}"
        return self.folder / f"{prefix}step-{step:06d}{suffix}.parquet"

    def write(
        self,
        step: int,
        rows: Sequence[Mapping[str, Any]],
        *,
        split: str = "train",
        part: int = 0,
        parts: int = 1,
    ) -> Path:
        """Write all samples of a step, or one writer's part of them; the file appears whole or not at all.

        Args:
            step: training step, also the value of the column `step`.
            rows: one mapping per sample with keys of `COLUMNS`; what is left out is null.
            split: "train", or the name of an evaluation whose samples go to files of their own.
            part, parts: which of how many writers this is; the step can be read when all have written.

        Raises:
            ValueError: an unknown column, or a required one that is missing.
            TypeError: a value of the wrong type, with sample and column.
            RunError: the disk refused.
        """
        import pyarrow.parquet as pq

        table = _table(step, rows)
        path = self.path(step, split=split, part=part, parts=parts)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)  # a link of that name would lead what is written elsewhere
            pq.write_table(table, temporary, compression="zstd", row_group_size=GROUP_ROWS)
            fsync_path(temporary)
            temporary.replace(path)
            for earlier in self._files(split=split, step=step):
                if (
                    earlier.parts != parts
                ):  # of a run with another number of writers that did this step before
                    earlier.path.unlink(missing_ok=True)
        except OSError as error:
            with suppress(OSError):  # the first error is the one to tell
                temporary.unlink()
            raise RunError(
                f"cannot write the samples of step {step} to {path}: {error.strerror or error}; free space "
                f"or set run.save_samples=false, then continue with --resume"
            ) from error
        return path

    def read(self, step: int | None = None, *, split: str = "train") -> list[dict[str, Any]]:
        """Samples in the order they were written, all columns, JSON columns as values.

        Args:
            step: only this step; None reads all.
            split: as in `write`.

        Raises:
            RunError: the step has no samples, or its file is damaged.
        """
        files = self.files(split=split)
        if step is not None and step not in files:
            have = f"steps {min(files)} to {max(files)} have" if files else "no step has"
            raise RunError(f"step {step} has no {split} samples in {self.folder}; {have} some")
        rows: list[dict[str, Any]] = []
        for number in files if step is None else [step]:
            for path in files[number]:
                rows += read_file(path)
        return rows

    def steps(self, *, split: str = "train") -> list[int]:
        """Steps whose samples are all written, in order."""
        return list(self.files(split=split))

    def files(self, *, split: str = "train") -> dict[int, list[Path]]:
        """The files of each step whose samples are all written, by step, in order."""
        files_of_step: dict[tuple[int, int], list[Path]] = {}
        for file in sorted(self._files(split=split)):
            files_of_step.setdefault((file.step, file.parts), []).append(file.path)
        return {step: paths for (step, parts), paths in sorted(files_of_step.items()) if len(paths) == parts}

    def discard_after(self, step: int) -> None:
        """Remove the samples of later steps, of every split: a resume makes these steps again."""
        for file in self._files():
            if file.step > step:
                file.path.unlink()

    def _files(self, *, split: str | None = None, step: int | None = None) -> list[_File]:
        """The files of this split (None: of all) and step, in no order."""
        try:
            paths = list(self.folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunError(f"cannot read the samples in {self.folder}: {error.strerror}") from error
        files = []
        for path in paths:
            match = _FILE.fullmatch(path.name)
            if (
                match
                and (split is None or (match["split"] or "train") == split)
                and (step is None or int(match["step"]) == step)
            ):
                file = _File(int(match["step"]), int(match["part"] or 0), int(match["parts"] or 1), path)
                files.append(file)
        return files


class _File(NamedTuple):
    """One file of the store; files sort by step, then by part."""

    step: int
    part: int
    parts: int
    path: Path


def _table(step: int, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    import pyarrow as pa

    checked = _checked_rows(step, rows)
    schema = schema_of()
    columns = []
    for schema_field in schema:
        values = [row[schema_field.name] for row in checked]
        try:
            columns.append(pa.array(values, type=schema_field.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise _type_error(schema_field, checked) from error
    return pa.Table.from_arrays(columns, schema=schema)


def _checked_rows(step: int, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows as they are written, their texts cut where all of them are more than a file should hold."""
    checked = [_checked_row(step, row) for row in rows]
    num_chars = sum(len(value) for row in checked for value in row.values() if isinstance(value, str))
    if num_chars <= _MAX_FILE_CHARS:
        return checked
    share = _MAX_FILE_CHARS // (len(rows) * len(COLUMNS))
    return [_checked_row(step, row, max_chars=share) for row in rows]


def _checked_row(step: int, row: Mapping[str, Any], max_chars: int = MAX_CHARS) -> dict[str, Any]:
    for name in row:
        if name not in COLUMNS:
            matches = difflib.get_close_matches(name, COLUMNS, n=1)
            hint = f"did you mean {matches[0]!r}?" if matches else f"known: {', '.join(COLUMNS)}"
            raise ValueError(f"sample {row.get('id')!r} has the unknown column {name!r}; {hint}")
    for name in REQUIRED:
        if row.get(name) is None:
            raise ValueError(f"sample {row.get('id')!r} has no {name}; all need {', '.join(REQUIRED)}")
    checked = {name: row.get(name) for name in COLUMNS} | {"step": step}
    return {name: _storable(name, checked[name], max_chars) for name in COLUMNS}


def _storable(name: str, value: object, max_chars: int) -> Any:
    """The value of a column, made so that writing cannot fail on what is in it; of a wrong type, as it is."""
    kind = COLUMNS[name]
    if kind == "json" and value is not None:
        if name == "earlier_sequences":  # our own numbers, several per token
            return json.dumps(storable(value, max_items=sys.maxsize))
        plain = storable(value, max_items=min(MAX_ITEMS, max_chars), max_chars=max_chars)
        return json.dumps(_normalized(name, plain), ensure_ascii=False)
    if kind == "string" and isinstance(value, str):
        return storable_text(value, max_chars=max_chars)
    if kind == "int32" and isinstance(value, int):
        return max(-_INT32, min(_INT32 - 1, value))
    return value


def _normalized(name: str, value: object) -> Any:
    """A plain value in the form that readers ask of its column; agents of users may give others."""
    if name in MAPPINGS:
        return value if isinstance(value, dict) else {"value": value}
    if name == "messages":
        messages = value if isinstance(value, list) else [value]
        return [
            message if is_message(message) else {"role": "no message", "content": json.dumps(message)}
            for message in messages
        ]
    return value


def _type_error(schema_field: pa.Field, rows: Sequence[Mapping[str, Any]]) -> TypeError:
    import pyarrow as pa

    name = schema_field.name
    for row in rows:
        try:
            pa.array([row[name]], type=schema_field.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            text = f"{row[name]!r:.80}"
            return TypeError(f"{name} of sample {row['id']} must be {COLUMNS[name]}, but is {text}")
    return TypeError(f"column {name} does not fit the type {COLUMNS[name]}")
