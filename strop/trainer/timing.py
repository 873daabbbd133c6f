"""The stages of a step, from outside: how long each took, which one runs now, and which role is active."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from strop.trainer.sections import RoleName
from strop.trainer.worker_groups import WorkerGroups
from strop.utils import timeline
from strop.utils.activity import activity


class Stages:
    """Seconds per stage of one step. A stage that runs twice adds up; one inside another counts as itself alone."""

    def __init__(self, roles: WorkerGroups | None = None) -> None:
        """`roles` are those that stages name."""
        self.seconds: dict[str, float] = {}
        self.current = ""
        """Name of the stage that runs; empty between stages. A crash report names it."""
        self._roles = roles
        self._start = time.perf_counter()
        self._inside = 0.0  # seconds of stages that ran inside the one that runs

    @contextlib.contextmanager
    def stage(self, name: str, role: RoleName | None = None) -> Iterator[None]:
        """The block is the stage `name`; the role that works gives its device back after it. No role: nobody's device
        is used."""
        start, outer, beside = time.perf_counter(), self.current, self._inside
        self.current, self._inside = name, 0.0
        with activity(name), timeline.span(name, "phase"):
            if role is not None and self._roles is not None:
                with self._roles.on_device(role):
                    yield
            else:
                yield
        # Not in a finally: after an exception `current` still says where it happened.
        passed = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + passed - self._inside
        self.current, self._inside = outer, beside + passed

    def total(self) -> float:
        """Seconds since this object was made."""
        return time.perf_counter() - self._start
