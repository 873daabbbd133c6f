"""The stages of a step, wrapped from outside: how long each took, which one runs now, and which role is active."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from strop.base.heartbeat import doing
from strop.trainer.roles import Roles

P = ParamSpec("P")
T = TypeVar("T")


class Phases:
    """Seconds per phase of one step. A phase that runs twice adds up; one inside another counts as itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.current = ""
        """Name of the phase that runs; empty between phases. A crash report names it."""
        self._start = time.perf_counter()
        self._inside = 0.0  # seconds of phases that ran inside the one that runs

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as `name`."""
        start, outer, beside = time.perf_counter(), self.current, self._inside
        self.current, self._inside = name, 0.0
        with doing(name):
            yield
        # Not in a finally: after an exception `current` still says where it happened.
        passed = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + passed - self._inside
        self.current, self._inside = outer, beside + passed

    def total(self) -> float:
        """Seconds since this object was made."""
        return time.perf_counter() - self._start


class Stages:
    """Runs the stages of a step: each is timed, and the role that works gives its device back after it."""

    def __init__(self, roles: Roles, phases: Phases | None = None) -> None:
        """`phases` is where the time is noted; not given: nowhere."""
        self._roles = roles
        self._phases = phases or Phases()

    def run(self, name: str, role: str, stage: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """What the stage returns. `role` names who works; empty where nobody's device is used."""
        with self._phases.phase(name):
            if not role:
                return stage(*args, **kwargs)
            with self._roles.active(role):
                return stage(*args, **kwargs)
