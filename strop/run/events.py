"""The event log: one JSON object per line, appended and never changed.

One process writes (the lock of the run folder sees to that), any number of processes read meanwhile. A
record counts from the moment its newline is in the file. What follows the last newline is the rest of an
interrupted write: readers skip it, and the next writer cuts it off before it appends.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any

from strop.run.errors import RunError
from strop.run.records import is_record
from strop.utils.atomic_io import append_line, whole_lines
from strop.utils.safe_read import parse_json
from strop.utils.sanitize import storable

Event = dict[str, Any]

RESUMED = "resumed"
"""Kind of the record that makes readers drop all earlier records of later steps, and that the run was finished."""
FINISHED = "finished"


class EventLog:
    """Append-only records of a run, each with a kind, a step and a time."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self.read_only = read_only
        self._file: FileIO | None = None

    def append(self, kind: str, step: int, *, fsync: bool = False, **fields: object) -> None:
        """Add one record; it is whole in the file when this returns.

        Args:
            kind: what happened, one word per kind of record.
            step: training step the record belongs to; 0 before the first one.
            fsync: also wait for the disk, so that the record survives a power cut.
            fields: any values; they are written as `strop.utils.sanitize.storable` makes them.

        Raises:
            RunError: the disk refused the record; the log ends with the record before it.
        """
        if self.read_only:
            raise RunError(f"{self.path} is open for reading only; open the run for writing first")
        if step < 0:
            raise ValueError(f"event {kind!r} has step {step}; steps count from 0")
        if "time" in fields:
            raise ValueError(f"event {kind!r} has a field 'time', a name the log itself uses; rename it")
        record = {"kind": kind, "step": step, "time": round(time.time(), 3), **fields}
        plain = storable(
            record, max_items=sys.maxsize, max_chars=sys.maxsize
        )  # the ledger's are as long as the run
        line = json.dumps(plain, ensure_ascii=False, separators=(",", ":"))
        if self._file is None:
            self._file = self._open()
        try:
            append_line(self._file, (line + "\n").encode())
            if fsync:
                self.sync()
        except OSError as error:
            raise RunError(
                f"cannot write the event log {self.path}: {error.strerror}; free space or check the disk, "
                f"then continue with --resume"
            ) from error

    def read(self, kind: str | None = None) -> list[Event]:
        """The records in the order they were written, without those that a resume took back.

        Args:
            kind: only records of this kind; None means all.

        Raises:
            RunError: a line in the middle is damaged; the message holds its number.
        """
        records = effective_events(self._parse()[0])
        return [record for record in records if kind is None or record["kind"] == kind]

    def rollback(self, step: int, **fields: object) -> None:
        """Continue from `step`: readers drop the records of later steps written so far."""
        self.append(RESUMED, step, fsync=True, **fields)

    def sync(self) -> None:
        """Wait until all records are on the disk; call it before a checkpoint that relies on them."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; a later append opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> FileIO:
        _, num_whole_bytes = self._parse()
        try:
            file = self.path.open("ab", buffering=0)
            if file.tell() > num_whole_bytes:
                file.truncate(num_whole_bytes)
            return file
        except OSError as error:
            raise RunError(
                f"cannot open the event log {self.path} for writing: {error.strerror}; choose a folder that "
                f"can be written with --out"
            ) from error

    def _parse(self) -> tuple[list[Event], int]:
        """All whole records, and the number of bytes they fill."""
        records: list[Event] = []
        num_bytes, damaged = 0, ""
        try:
            for number, line in enumerate(whole_lines(self.path), start=1):
                if damaged:
                    raise RunError(damaged)
                record = _record(line)
                if record is None:  # a power cut can leave a last line of the right length, not content
                    damaged = (
                        f"line {number} of {self.path} is no event record: {line[:60]!r}; the file was changed "
                        f"or the disk is faulty. Restore it from a backup, or remove that line."
                    )
                    continue
                records.append(record)
                num_bytes += len(line)
        except FileNotFoundError:
            return [], 0
        except OSError as error:
            raise RunError(f"cannot read the event log {self.path}: {error.strerror}") from error
        return records, num_bytes


def effective_events(records: Iterable[Event]) -> list[Event]:
    """The records that count: a resume takes back those of later steps, and that the run was finished."""
    valid: list[Event] = []
    for record in records:
        if record["kind"] == RESUMED:
            valid = [
                earlier
                for earlier in valid
                if earlier["step"] <= record["step"] and earlier["kind"] != FINISHED
            ]
        valid.append(record)
    return valid


def _record(line: bytes) -> Event | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if is_record(record) else None
