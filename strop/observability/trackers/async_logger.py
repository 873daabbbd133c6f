"""Asynchronous logging: a tracker whose library is called from a thread, so that a slow or failing one costs the run
nothing.

Concurrency: the thread alone calls the tracker's library. The run puts steps into an unbounded queue, a few kilobytes
each. At the end it waits CLOSE_S seconds for the rest; steps that were not logged by then are in metrics.jsonl, and
`strop track` sends them later.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from strop.observability.trackers.run_metadata import COLUMNS, RunMetadata, finite, is_validation
from strop.observability.trackers.setup import PROJECT, TrackerSetup

CLOSE_S = 60.0


class Remote(ABC):
    """Client of one tracking service for one run; its methods may raise anything and take any time."""

    name: ClassVar[str]
    package: ClassVar[str]
    """Module of its library."""
    project_variable: ClassVar[str] = ""
    """Variable of the environment by which its library is told the project; empty: there is none."""

    def __init__(self, metadata: RunMetadata) -> None:
        self.metadata = metadata

    @property
    def project(self) -> str:
        """Project of the run there: where the settings name none, the one that the library's variable names."""
        named = self.metadata.project
        return os.environ.get(self.project_variable, "") or named if named == PROJECT else named

    @abstractmethod
    def begin(self) -> None:
        """Start the run there, or continue it after a resume."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""

    @abstractmethod
    def log_samples(self, step: int, split: str, rows: Sequence[Sequence[Any]]) -> None:
        """Log a table of samples; rows have the columns COLUMNS."""

    @abstractmethod
    def log_curve(self, picture: Path) -> None:
        """Log the picture of the run, at its end."""

    @abstractmethod
    def end(self) -> None:
        """Finish the run there: it is over, or interrupted."""


class AsyncTracker:
    """A `strop.observability.trackers.setup.Tracker` that logs to a remote from a thread."""

    remote: ClassVar[type[Remote]]
    """Client of the service; a subclass sets it."""

    @classmethod
    def check(cls) -> None:
        """Raise a ValueError where the package of the service is not installed."""
        if importlib.util.find_spec(cls.remote.package) is None:
            raise ValueError(
                f"the tracker {cls.remote.name!r} needs a package that is not installed: pip install "
                f"'strop[{cls.remote.name}]', or take {cls.remote.name} out of trainer.trackers"
            )

    def __init__(self, setup: TrackerSetup) -> None:
        self._remote = self.remote(RunMetadata.read(setup))
        self._queue: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._num_queued = self._num_logged = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {self.remote.name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue metrics of a step; an error of an earlier one is raised here."""
        if self._error is not None:
            raise self._error
        self._num_queued += 1
        self._queue.put((step, dict(metrics)))

    def close(self) -> None:
        """Wait until the queue is empty, for at most CLOSE_S seconds.

        Raises:
            TimeoutError: it is not; the sentence says how many steps were logged.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(
                f"it had taken {self._num_logged} of {self._num_queued} steps {CLOSE_S:.0f} s after the last one; "
                f"`strop track {self._remote.metadata.folder} --to {self.remote.name}` sends all of it later"
            )
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            with _start_lock():
                self._remote.begin()
                item = self._queue.get()
                if item is not None:
                    self._log_step(*item)
            while item is not None and (item := self._queue.get()) is not None:
                self._log_step(*item)
            end_run(self._remote)
        except Exception as error:  # noqa: BLE001 (of the library; raised where the run can report it)
            self._error = error
        except BaseException as error:  # noqa: BLE001 (raised as it is, it would end the run)
            self._error = RuntimeError(f"{type(error).__name__} in the thread of the tracker: {error}")
            self._error.__cause__ = error

    def _log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        log_step(self._remote, step, metrics)
        self._num_logged += 1


def make_async_tracker(remote: type[Remote]) -> type[AsyncTracker]:
    """Make the class of a tracker that logs to this remote."""
    return type(f"{remote.__name__}Tracker", (AsyncTracker,), {"remote": remote})


_START_LOCK = threading.Lock()
_START_LOCK_S = 20.0


@contextlib.contextmanager
def _start_lock() -> Iterator[None]:
    """Lock under which a tracker starts, waited for at most _START_LOCK_S seconds: while several threads import the
    same libraries for the first time, one of them may see a module that is half imported."""
    is_held = _START_LOCK.acquire(timeout=_START_LOCK_S)
    try:
        yield
    finally:
        if is_held:
            _START_LOCK.release()


def log_step(remote: Remote, step: int, metrics: Mapping[str, float]) -> None:
    """Log a step; where it ended with a validation, with its samples."""
    remote.log(step, finite(metrics))
    if is_validation(metrics):
        for split in ("val", "train"):
            if rows := remote.metadata.samples(step, split):
                remote.log_samples(step, split, rows)


def end_run(remote: Remote) -> None:
    """Log the picture of the run, and finish it."""
    try:
        if picture := remote.metadata.curve():
            remote.log_curve(picture)
    finally:
        remote.end()


def as_columns(rows: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """Columns of a table, by name."""
    return {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)
