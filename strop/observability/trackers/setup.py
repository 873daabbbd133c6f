"""Where the numbers of a run go: into its metrics file, and where strop.observability.trackers shows or sends them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from strop.run.errors import RunError
from strop.run.records import MAX_STEP
from strop.utils.atomic_io import append_line, replace_text, whole_lines
from strop.utils.lazy_import import lazy_names
from strop.utils.safe_read import open_regular, parse_json
from strop.utils.sanitize import as_number, storable, storable_text

if TYPE_CHECKING:
    from strop.observability.trackers.group import Tracker, TrackerGroup, trackers

__all__ = [
    "METRICS_FILE",
    "JsonlTracker",
    "Tracker",
    "TrackerGroup",
    "TrackerSetup",
    "Trackers",
    "check_trackers",
    "read_metrics",
    "trackers",
    "trackers_of",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "strop.observability.trackers.group": "Tracker TrackerGroup trackers",
    },
)

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class TrackerSetup:
    """What a tracker may need to start."""

    folder: Path
    """The run folder."""
    total_steps: int
    """Steps of the whole run, those before a resume included."""
    resume_step: int = 0
    """Last step that counts; logging goes on with the one after it. 0 in a run that starts."""
    project: str = "strop"
    """What trackers of other people keep the run in."""
    name: str = ""
    """Its name there; empty: that of its folder."""
    label: str = "train"
    """Name of the activity beside the progress bar."""
    console: Console = field(default_factory=lambda: Console(stderr=True))
    """Where progress is shown; standard output stays free for results."""


class Trackers:
    """The trackers of a run as one. Here they are its metrics file alone, where that is asked for."""

    def __init__(self, names: Sequence[str], setup: TrackerSetup) -> None:
        file = setup.folder / METRICS_FILE
        self._file = JsonlTracker(file, resume_step=setup.resume_step) if "jsonl" in names else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take metrics of one step, whatever their names and values came from; several calls for one step add up."""
        if self._file is not None:
            self._file.log(step, {storable_text(name): as_number(value) for name, value in metrics.items()})

    def note(self, text: str) -> None:
        """Show how far a step is, where anything shows it."""

    def close(self) -> None:
        """Write what is pending and let go of files and the terminal; a second call does nothing."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_trackers(names: Sequence[str]) -> None:
    """Raise a ValueError, with the known names, when one of these is no tracker, or lacks what it needs."""
    if any(name != "jsonl" for name in names):
        from strop.observability.trackers import group  # imports this module

        group.check_trackers(names)


def trackers_of(names: Sequence[str], setup: TrackerSetup) -> Trackers:
    """The trackers of these names.

    Raises:
        ValueError: as `check_trackers`.
        RunError: the metrics file cannot be written.
    """
    check_trackers(names)
    from strop.observability.trackers.group import TrackerGroup  # imports this module

    return TrackerGroup(names, setup)


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
    kept = [
        json.dumps(record, ensure_ascii=False) + "\n" for record in _records(path) if record["step"] <= step
    ]
    text = "".join(kept)
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
