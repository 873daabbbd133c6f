"""The records of a run as they grow: metrics and events, each line of a file read once.

A resume writes a file anew; such a file is read from its beginning. Records of samples (which are begun, what became of
them) are most of an event log and are passed over.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.observability.trackers.setup import METRICS_FILE
from strop.run import RunError
from strop.run.events import effective_events
from strop.run.folder import RUN_FILE, SAMPLES, no_run
from strop.run.lock import is_alive
from strop.run.records import MAX_STEP, is_record
from strop.run.samples import SampleStore
from strop.utils.safe_read import lines_of, open_regular, parse_json, read_json
from strop.utils.sanitize import as_number

_OF_SAMPLES = tuple(
    f'{{"kind":"{kind}"'.encode() for kind in ("issued", "settled", "fingerprint", "schedule")
)


def is_held(path: Path) -> bool:
    """True if a process writes the run whose lock file this is; False for one that is not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here: the name in the file decides
        try:
            owner = parse_json(os.pread(descriptor, 4096, 0))
        except (ValueError, OSError):
            return False
        return isinstance(owner, dict) and is_alive(owner.get("pid", 0))
    finally:
        os.close(descriptor)
    return False


class GrowingLines:
    """A file of JSON lines."""

    def __init__(self, path: Path, *, but: tuple[bytes, ...] = ()) -> None:
        """Args:
        path: the file; it may not be there yet.
        but: beginnings of lines that are not wanted.
        """
        self._path, self._but = path, but
        self._file = (0, 0)
        self._offset = 0
        self.records: list[Any] = []

    def read_on(self) -> bool:
        """Read what was added; whether the records are others than before.

        Raises:
            RunError: the file cannot be read.
        """
        try:
            with open_regular(self._path) as file:
                stat = os.fstat(file.fileno())
                is_new = (stat.st_dev, stat.st_ino) != self._file or stat.st_size < self._offset
                if is_new:
                    had = bool(self.records)
                    self.records, self._offset, self._file = [], 0, (stat.st_dev, stat.st_ino)
                elif stat.st_size == self._offset:
                    return False
                file.seek(self._offset)
                before = len(self.records)
                for line in lines_of(file, self._path):
                    if not line.endswith(b"\n"):  # it is being written
                        break
                    self._offset += len(line)
                    if not line.startswith(self._but):
                        self._take(line)
                return len(self.records) > before or (is_new and had)
        except FileNotFoundError:
            had, self.records, self._offset = bool(self.records), [], 0
            return had
        except OSError as error:
            raise RunError(f"cannot read {self._path}: {error.strerror or error}") from error

    def _take(self, line: bytes) -> None:
        try:
            self.records.append(parse_json(line))
        except ValueError:  # a power cut can leave one; the event log itself reports it
            return


class RunRecords:
    """Records of a run, read from its folder, except the fates of single samples: those make opening a folder slow."""

    def __init__(self, path: Path) -> None:
        """Raises:
        RunError: no run is there.
        """
        self.path = path
        try:
            info = read_json(path / RUN_FILE)
        except (FileNotFoundError, NotADirectoryError):
            raise no_run(path) from None
        except (OSError, ValueError) as error:
            raise RunError(f"{path} holds no run that can be read: {error!s:.200}") from error
        self.info: Mapping[str, Any] = info if isinstance(info, dict) else {}
        self.samples = SampleStore(path / SAMPLES)
        self._events = GrowingLines(path / "events.jsonl", but=_OF_SAMPLES)
        self._metrics = GrowingLines(path / METRICS_FILE)
        self._num_taken = 0
        self.events: list[dict[str, Any]] = []
        """Without those of single samples, and without those that a resume took back."""
        self.metrics: dict[int, dict[str, float]] = {}
        """Metrics by step."""

    def read_on(self) -> bool:
        """Read what was added; whether anything was."""
        has_events, has_metrics = self._events.read_on(), self._metrics.read_on()
        if has_events:
            self.events = effective_events(event for event in self._events.records if is_record(event))
        if has_metrics:
            if len(self._metrics.records) <= self._num_taken:  # the file is another one
                self.metrics, self._num_taken = {}, 0
            for record in self._metrics.records[self._num_taken :]:
                self._add(record)
            self._num_taken = len(self._metrics.records)
        return has_events or has_metrics

    def _add(self, record: object) -> None:
        step = record.get("step") if isinstance(record, dict) else None
        if isinstance(record, dict) and type(step) is int and 0 <= step < MAX_STEP:
            numbers = {name: as_number(value) for name, value in record.items() if name != "step"}
            self.metrics.setdefault(step, {}).update(numbers)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Events of one kind, in order."""
        return [event for event in self.events if event["kind"] == kind]

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings with which it began."""
        settings = self.info.get("config")
        return settings if isinstance(settings, dict) else {}

    def is_running(self) -> bool:
        """True if a process writes it."""
        return is_held(self.path / "lock")
