"""Reader of the sample store's files, as untrusted input.

Every row that comes out has all columns of `strop.run.samples`, each of its type; what a file holds beyond that is left
out. A file that is no Parquet, decompresses to more than a limit, or holds other things under our names is an error
with a sentence.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.run.errors import RunError
from strop.run.samples.columns import GROUP_ROWS, JSON_COLUMNS, MAPPINGS, is_message, schema_of
from strop.utils.safe_read import check_regular, parse_json
from strop.utils.sanitize import as_number

if TYPE_CHECKING:
    import pyarrow as pa

MIN_BYTES = 2**30
"""Memory that one file may take on any machine, as Arrow holds it."""
MEMORY_SHARE = 1 / 16
"""Share of the machine's memory that one file may take where that is more: as Python objects the rows take several
times as much. A step of 1,024 samples of 128k tokens takes 2 GiB."""
MAX_VALUES = 2**28
"""Limit of the values of one column of one row group, those in lists counted one by one."""
_NUMBER_COLUMNS = ("rollout_log_probs", "versions", "old_log_probs", "entropys", "advantages")
_TOKEN_COLUMNS = ("response_ids", "response_mask", *_NUMBER_COLUMNS)
_LIST_OF_MAPPINGS = ("messages", "earlier_sequences")
_WORDS = {word: as_number(word) for word in ("nan", "inf", "-inf")}


def read_file(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, in order.

    Raises:
        RunError: the file cannot be read, is too large, or holds something else.
    """
    rows = [row for table in tables_of(path, schema_of()) for row in table.to_pylist()]
    for number, row in enumerate(rows):
        try:
            for name in JSON_COLUMNS:
                if row[name] is not None:
                    row[name] = parse_json(row[name])
            _check_row(row)
        except ValueError as error:
            raise RunError(f"the samples in {path} are damaged: row {number}: {error!s:.200}") from error
    return rows


def _max_bytes() -> int:
    """Limit of the memory for the rows that are read of one file."""
    return max(MIN_BYTES, int(MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")))


def tables_of(path: Path, schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows as tables of the schema, a few rows at a time; a column that the file lacks is null.

    Raises:
        RunError: the file cannot be read, or is too large.
    """
    import pyarrow as pa

    try:
        yield from _batches(path, schema)
    except OSError as error:
        raise RunError(f"cannot read the samples in {path}: {error.strerror or error}") from error
    except (pa.ArrowException, ValueError) as error:
        raise RunError(f"cannot read the samples in {path}: {error!s:.200}") from error


def _batches(path: Path, schema: pa.Schema) -> Iterator[pa.Table]:
    """As `tables_of`; a small file may stand for a huge one, so what is read is counted."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_regular(path)
    with pq.ParquetFile(path) as file:
        meta = file.metadata
        for group in range(meta.num_row_groups):
            for column in range(meta.num_columns):
                if meta.row_group(group).column(column).num_values > MAX_VALUES:
                    raise ValueError(f"a column has more than {MAX_VALUES} values in a row group")
        present = set(file.schema_arrow.names)
        if "id" not in present:
            raise ValueError(f"it has no column id (found: {', '.join(sorted(present)[:8]) or 'none'})")
        names = [field.name for field in schema if field.name in present]
        total, limit = 0, _max_bytes()
        for batch in file.iter_batches(GROUP_ROWS, columns=names):
            columns = [
                batch.column(field.name).cast(field.type)
                if field.name in present
                else pa.nulls(batch.num_rows, field.type)
                for field in schema
            ]
            table = pa.Table.from_arrays(columns, schema=schema)
            total += table.nbytes
            if total > limit:
                raise ValueError(
                    f"its rows take more than {limit / 2**30:.3g} GiB, too much for the memory here"
                )
            yield table


def _check_row(row: Mapping[str, Any]) -> None:
    """Raise a ValueError for a row that cannot be shown or scored."""
    for name in ("id", "uid", "step"):
        if row[name] is None:
            raise ValueError(f"it has no {name}")
    for name in MAPPINGS:
        if row[name] is not None and not isinstance(row[name], dict):
            raise ValueError(f"{name} is a {type(row[name]).__name__} and no mapping")
    for name in _LIST_OF_MAPPINGS:
        entries = row[name]
        if entries is not None and not (
            isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
        ):
            raise ValueError(f"{name} is no list of mappings")
    for sequence in (row, *(row["earlier_sequences"] or ())):
        if sequence is not row and isinstance(log_probs := sequence.get("rollout_log_probs"), list):
            # JSON has no word for numbers that are not finite; the column of the row itself has.
            sequence["rollout_log_probs"] = [
                _WORDS.get(entry, entry) if isinstance(entry, str) else entry for entry in log_probs
            ]
        _check_tokens(sequence)
    if not all(map(is_message, row["messages"] or ())):
        raise ValueError("a message has no role, or its tokens, calls or images have another form")


def _check_tokens(sequence: Mapping[str, Any]) -> None:
    """The columns of a sequence's tokens are lists, and ids are ids."""
    columns = {name: sequence.get(name) for name in (*_TOKEN_COLUMNS, "prompt_ids")}
    for name, column in columns.items():
        if column is not None and not isinstance(column, list):
            raise ValueError(f"{name} is a {type(column).__name__} and no list")
    ids = [*(columns["prompt_ids"] or ()), *(columns["response_ids"] or ())]
    numbers = [value for name in _NUMBER_COLUMNS for value in columns[name] or ()]
    if not all(type(value) is int and value >= 0 for value in ids):
        raise ValueError("a token id is no number from 0")
    if not all(isinstance(value, (int, float)) for value in numbers):
        raise ValueError("a log-prob or a version is no number")
