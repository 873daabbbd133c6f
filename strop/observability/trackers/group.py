"""Several trackers as one, by the names that a configuration uses: built-in ones, and those that users register.

A tracker is made from a `TrackerSetup` by a name of the registry. All of them survive a resume: what they
hold about steps after the resume point is replaced by what the continued run logs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self

from strop.observability.trackers.async_logger import AsyncTracker
from strop.observability.trackers.clearml import ClearmlTracker
from strop.observability.trackers.comet import CometTracker
from strop.observability.trackers.console import ConsoleTracker
from strop.observability.trackers.mlflow import MlflowTracker
from strop.observability.trackers.setup import (
    JSONL,
    METRICS_FILE,
    Tracker,
    TrackerFactory,
    TrackerSetup,
    jsonl_tracker,
    trackers,
)
from strop.observability.trackers.swanlab import SwanlabTracker
from strop.observability.trackers.tensorboard import TensorBoardTracker
from strop.observability.trackers.trackio import TrackioTracker
from strop.observability.trackers.wandb import WandbTracker
from strop.run.errors import RunError
from strop.utils.registry import unknown
from strop.utils.sanitize import as_number, storable_text
from strop.utils.sanitize.text import BROKEN

logger = logging.getLogger(__name__)


_CLASSES = {
    "console": ConsoleTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanlabTracker,
    "trackio": TrackioTracker,
    "clearml": ClearmlTracker,
    "comet": CometTracker,
}
BUILT_IN = tuple(_CLASSES)
"""Names of the built-in trackers beside `jsonl`."""
REMOTE = tuple(name for name, tracker in _CLASSES.items() if issubclass(tracker, AsyncTracker))
"""Names of the built-in trackers elsewhere, to which a recorded run can be sent."""


def built_in(name: str) -> Any:
    """The class of a tracker, which has check() for what it needs; its own library is imported when one is made."""
    return _CLASSES[name]


def check_trackers(names: Sequence[str]) -> None:
    """Refuse names of which one is no tracker, lacks what it needs, or is that of a built-in tracker and of another.

    Raises:
        ValueError: the sentence lists the known names, or says what is missing, or what has the name too.
    """
    for name in names:
        if name in BUILT_IN:
            trackers.check_built_in(name)
            built_in(name).check()
        elif name == JSONL:
            trackers.check_built_in(name, jsonl_tracker)
        elif name in trackers:
            trackers[name]  # a package that brings it is imported now
        else:
            names_known = {*trackers.names(), *BUILT_IN}
            raise ValueError(unknown(trackers.kind, name, names_known, group=trackers.group))


def _factory(name: str) -> TrackerFactory:
    """Factory of a tracker: a registered one, or a built-in one."""
    return built_in(name) if name in BUILT_IN else trackers[name]


class TrackerGroup:
    """Several trackers as one.

    The run does not depend on trackers: one that fails, also when it is made, is reported once and left out from then
    on. The exception is the tracker of the run's own record: an error of it ends the run.
    """

    def __init__(self, names: Sequence[str], setup: TrackerSetup) -> None:
        check_trackers(names)
        factories = [(name, _factory(name)) for name in names]
        self._trackers: dict[str, Tracker] = {}
        try:
            for name, factory in factories:
                try:
                    self._trackers[name] = factory(setup)
                except RunError:
                    raise
                except BROKEN as error:  # as in log
                    if name == JSONL:
                        raise
                    _warn(name, error)
        except BaseException:  # if one cannot start, those before it are closed
            self.close()
            raise

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give metrics of one step to every tracker, whatever their names and values came from."""
        numbers = {storable_text(name): as_number(value) for name, value in metrics.items()}
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, numbers)
            except RunError:
                raise
            except BROKEN as error:  # a tracker may be the user's, and the run does not depend on it
                if name == JSONL:
                    raise
                _warn(name, error)
                self._close_one(name, is_reported=True)

    def note(self, text: str) -> None:
        """Let trackers that have a method `note` show how far a step is."""
        for name, tracker in list(self._trackers.items()):
            try:
                if note := getattr(tracker, "note", None):
                    note(text)
            except BROKEN as error:  # as in log
                _warn(name, error)
                self._close_one(name, is_reported=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every tracker, also when one of them fails to."""
        for name in reversed(list(self._trackers)):
            self._close_one(name)

    def _close_one(self, name: str, *, is_reported: bool = False) -> None:
        try:
            self._trackers.pop(name).close()
        except BROKEN as error:  # as in log
            if not is_reported:
                _warn(name, error)


def _warn(name: str, error: BaseException) -> None:
    """Report that a tracker failed; a logger of its own, since of one logger a warning is shown once."""
    logger.getChild(name).warning(
        "the tracker %r failed and is switched off; the run goes on, and %s has its numbers: %s",
        name, METRICS_FILE, f"{type(error).__name__}: {error}",
    )  # fmt: skip
    logger.debug("how it failed", exc_info=error)
