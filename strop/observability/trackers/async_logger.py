"""A tracker that is told from a thread of its own, so that one that fails or waits costs the run nothing.

Concurrency: the thread alone speaks to the tracker's library. The run puts steps into a queue, which holds as many as
come: a few kilobytes each. At the end it waits CLOSE_S seconds for the rest; what was not told by then is in
metrics.jsonl, and `strop track` tells it later.
"""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from strop.observability.trackers.run_metadata import COLUMNS, Story, finite, is_validation
from strop.observability.trackers.setup import TrackerSetup

CLOSE_S = 60.0


class Remote(ABC):
    """One program's way to take a run; methods may raise what they like and take as long as they like."""

    name: ClassVar[str]
    package: ClassVar[str]
    """Module that is imported."""

    def __init__(self, story: Story) -> None:
        self.story = story

    @abstractmethod
    def begin(self) -> None:
        """Begin the run there, or go on with it."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of a step."""

    @abstractmethod
    def log_samples(self, step: int, split: str, rows: Sequence[Sequence[Any]]) -> None:
        """A table of samples; rows have the columns COLUMNS."""

    @abstractmethod
    def log_curve(self, picture: Path) -> None:
        """The picture of the run, at its end."""

    @abstractmethod
    def end(self) -> None:
        """The run is over, or interrupted."""


class Behind:
    """A `strop.observability.trackers.setup.Tracker` that tells a remote from a thread; subclasses say which one."""

    remote: ClassVar[type[Remote]]

    @classmethod
    def check(cls) -> None:
        """Raise a ValueError where the program's package is not installed."""
        name = cls.remote.package
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"the tracker {cls.remote.name!r} needs a package that is not installed: pip install "
                f"'strop[{cls.remote.name}]', or take {cls.remote.name} out of trainer.trackers"
            )

    def __init__(self, setup: TrackerSetup) -> None:
        self._remote = self.remote(Story.of(setup))
        self._waiting: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._num_given = self._num_told = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {self.remote.name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take numbers of a step; an error of an earlier one is raised here."""
        if self._error is not None:
            raise self._error
        self._num_given += 1
        self._waiting.put((step, dict(metrics)))

    def close(self) -> None:
        """Let it finish, for a while."""
        if self._is_closed:
            return
        self._is_closed = True
        self._waiting.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(
                f"it had taken {self._num_told} of {self._num_given} steps {CLOSE_S:.0f} s after the last one; `strop "
                f"track {self._remote.story.folder} --to {self.remote.name}` tells it all later"
            )
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        try:
            with _beginning():
                self._remote.begin()
                item = self._waiting.get()
                if item is not None:
                    self._tell(*item)
            while item is not None and (item := self._waiting.get()) is not None:
                self._tell(*item)
            tell_end(self._remote)
        except Exception as error:  # noqa: BLE001 (the program's; it is raised where the run can say it)
            self._error = error
        except BaseException as error:  # noqa: BLE001 (raised as it is, it would end the run)
            self._error = RuntimeError(f"{type(error).__name__} in the thread of the tracker: {error}")
            self._error.__cause__ = error

    def _tell(self, step: int, metrics: Mapping[str, float]) -> None:
        tell_step(self._remote, step, metrics)
        self._num_told += 1


def told_behind(remote: type[Remote]) -> type[Behind]:
    """The tracker that tells this remote."""
    return type(f"{remote.__name__}Tracker", (Behind,), {"remote": remote})


_BEGINNING = threading.Lock()
_BEGIN_S = 20.0


@contextlib.contextmanager
def _beginning() -> Iterator[None]:
    """One tracker at a time begins, for a while: while several threads import the same libraries for the first time,
    one of them may see a half of one."""
    is_held = _BEGINNING.acquire(timeout=_BEGIN_S)
    try:
        yield
    finally:
        if is_held:
            _BEGINNING.release()


def tell_step(remote: Remote, step: int, metrics: Mapping[str, float]) -> None:
    """A step with its samples, where it ended with a validation."""
    remote.log(step, finite(metrics))
    if is_validation(metrics):
        for split in ("val", "train"):
            if rows := remote.story.samples(step, split):
                remote.log_samples(step, split, rows)


def tell_end(remote: Remote) -> None:
    """The picture of the run, and its end."""
    try:
        if picture := remote.story.curve():
            remote.log_curve(picture)
    finally:
        remote.end()


def as_records(rows: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """A table by column."""
    return {name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)
