"""Trackers take the numbers of a run: their contract and registry, and the metrics file, which is one of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from strop.run.errors import RunError
from strop.run.records import MAX_STEP
from strop.utils.atomic_io import append_line, replace_text, whole_lines
from strop.utils.registry import Registry
from strop.utils.safe_read import open_regular, parse_json
from strop.utils.sanitize import as_number, storable

METRICS_FILE = "metrics.jsonl"
JSONL = "jsonl"
"""Name of the tracker that writes it."""
PROJECT = "strop"
"""Project of a run whose settings name none."""


@dataclass(frozen=True, kw_only=True)
class TrackerSetup:
    """Setup of a tracker: run, folder, console and settings that it may need to start."""

    folder: Path
    """The run folder."""
    total_steps: int
    """Steps of the whole run, those before a resume included."""
    resume_step: int = 0
    """Last step that counts; logging goes on with the one after it. 0 in a run that starts."""
    project: str = PROJECT
    """Project of the run in external trackers."""
    name: str = ""
    """Its name there; empty: that of its folder."""
    label: str = "train"
    """Name of the activity beside the progress bar."""
    console: Console = field(default_factory=lambda: Console(stderr=True))
    """Console for progress; standard output stays free for results."""


class Tracker(Protocol):
    """Takes the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take metrics of one step; several calls for one step add up."""

    def close(self) -> None:
        """Write what is pending and let go of files and the terminal; a second call does nothing."""


TrackerFactory = Callable[[TrackerSetup], Tracker]


trackers: Registry[TrackerFactory] = Registry("tracker", group="strop.trackers")
"""Tracker factories by the names that a configuration uses."""


class JsonlTracker:
    """Metrics as lines of JSON: {"step": 3, "actor/loss": 0.1, ...}. NaN and infinities are strings."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        self.path = path
        try:
            _drop_lines_after(path, resume_step)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise RunError(
                f"cannot write {path}: {error.strerror}; free space or check the disk, then continue with --resume"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line; it is in the file when this returns."""
        record = storable({"step": step, **metrics})
        try:
            append_line(self._file, (json.dumps(record, ensure_ascii=False) + "\n").encode())
        except OSError as error:
            raise RunError(
                f"cannot write the metrics of step {step} to {self.path}: {error.strerror}; free space, then "
                f"continue with --resume"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@trackers.register(JSONL)
def jsonl_tracker(setup: TrackerSetup) -> Tracker:
    """One JSON object per line in `metrics.jsonl`."""
    return JsonlTracker(setup.folder / METRICS_FILE, resume_step=setup.resume_step)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The metrics of a run by step, in order, from a `metrics.jsonl`; lines of one step are joined.

    Each dict has the key "step". A line that an interrupted run left unfinished is passed over.
    """
    by_step: dict[int, dict[str, float]] = {}
    for record in _records(path):
        joined = by_step.setdefault(record["step"], {"step": record["step"]})
        joined.update({name: as_number(value) for name, value in record.items() if name != "step"})
    return [by_step[step] for step in sorted(by_step)]


def _drop_lines_after(path: Path, step: int) -> None:
    """Rewrite the file without later steps and without an unfinished line; a file that has none stays."""
    if not path.exists():
        return
    lines = [
        json.dumps(storable(record), ensure_ascii=False) + "\n"
        for record in _records(path)
        if record["step"] <= step
    ]
    text = "".join(lines)
    with open_regular(path) as file:
        is_same = file.read(len(text.encode()) + 1) == text.encode()
    if not is_same:
        replace_text(path, text)


def _records(path: Path) -> list[dict[str, Any]]:
    records = []
    for line in whole_lines(path):
        try:
            record = parse_json(line)
        except ValueError:
            continue
        step = record.get("step") if isinstance(record, dict) else None
        if type(step) is int and 0 <= step < MAX_STEP:
            records.append(record)
    return records
