"""Where the numbers of a run go: a JSON-lines file, and what guests bring.

A tracker is made from a `TrackerSetup` by a name of the registry. All of them survive a resume: what they
hold about steps after the resume point is replaced by what the continued run logs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console

from strop.base.durable import append_line, replace_text, whole_lines
from strop.base.foreign_files import open_regular, parse_json
from strop.base.guests import joined, targets
from strop.base.registry import Registry, unknown
from strop.border import as_number, storable, storable_text
from strop.run.errors import RunError
from strop.run.records import MAX_STEP

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class Tracker(Protocol):
    """Takes the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take metrics of one step; several calls for one step add up."""

    def close(self) -> None:
        """Write what is pending and let go of files and the terminal; a second call does nothing."""


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


TrackerFactory = Callable[[TrackerSetup], Tracker]


trackers: Registry[TrackerFactory] = Registry("tracker")
"""Tracker factories by the names that a configuration uses."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise a ValueError, with the known names, when one of these is no tracker, or lacks what it needs."""
    for name in names:
        if name in targets("tracker"):
            joined("tracker", name).check()
        elif name not in trackers:
            raise ValueError(unknown("tracker", name, {*trackers, *targets("tracker")}))


def _factory(name: str) -> TrackerFactory:
    """What makes a tracker: one that is registered, or one of a guest."""
    factory: TrackerFactory = trackers[name] if name in trackers else joined("tracker", name)
    return factory


class TrackerGroup:
    """Several trackers as one.

    What trackers show is no part of the run: one that fails is said once and left out from then on. The exception is a
    RunError, by which the one that keeps the run's own record ends it.
    """

    def __init__(self, names: Sequence[str], setup: TrackerSetup) -> None:
        check_trackers(names)
        factories = [(name, _factory(name)) for name in names]
        self._trackers: dict[str, Tracker] = {}
        try:
            for name, factory in factories:
                try:
                    self._trackers[name] = factory(setup)
                except OSError as error:
                    _warn(name, error)
        except BaseException:  # if one cannot start, those before it are closed
            self.close()
            raise

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give metrics of one step to every tracker, whatever their names and values came from."""
        plain = {storable_text(name): as_number(value) for name, value in metrics.items()}
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, plain)
            except RunError:
                raise
            except Exception as error:  # noqa: BLE001 (a tracker may be the user's; the run does not depend on it)
                _warn(name, error)
                self._close_one(name, is_said=True)

    def note(self, text: str) -> None:
        """Let trackers that have a method `note` show how far a step is."""
        for name, tracker in list(self._trackers.items()):
            try:
                if show := getattr(tracker, "note", None):
                    show(text)
            except Exception as error:  # noqa: BLE001 (as in log)
                _warn(name, error)
                self._close_one(name, is_said=True)

    def close(self) -> None:
        """Close every tracker, also when one of them fails to."""
        for name in reversed(list(self._trackers)):
            self._close_one(name)

    def _close_one(self, name: str, *, is_said: bool = False) -> None:
        try:
            self._trackers.pop(name).close()
        except Exception as error:  # noqa: BLE001 (as in log)
            if not is_said:
                _warn(name, error)

    def __enter__(self) -> TrackerGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _warn(name: str, error: Exception) -> None:
    """Say that a tracker failed."""
    logger.warning(
        "the tracker %r failed and is switched off; the run goes on, and %s has its numbers: %s",
        name, METRICS_FILE, f"{type(error).__name__}: {error}",
    )  # fmt: skip
    logger.debug("how it failed", exc_info=error)


@trackers.register("jsonl")
def jsonl_tracker(setup: TrackerSetup) -> Tracker:
    """One JSON object per line in `metrics.jsonl`."""
    return JsonlTracker(setup.folder / METRICS_FILE, resume_step=setup.resume_step)


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
