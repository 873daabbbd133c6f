"""Seconds of each phase of a run, from its event log.

A run is one stretch of time, or several where it was continued, each from its start to its last event. The phases of
its steps are those of the event `step`; what lies between is the start of the roles, the preflight, validations,
checkpoints, the writing of profiles and, for the rest, `other`. The phases of a run add up to its time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from strop.observability.viewer.records import RunRecords
from strop.run.folder import PROFILED, ROLES_STARTED
from strop.utils.sanitize import finite

START, PREFLIGHT, FIRST_VALIDATION, TESTING, CHECKPOINT, PROFILE, OTHER = (
    "start", "preflight", "first_validation", "testing", "save_checkpoint", "profile", "other",
)  # fmt: skip
_BEGINS = ("created", "resumed")
"""Kinds of the events that begin a stretch."""
_CHECKPOINT_METRIC = f"timing_s/{CHECKPOINT}"


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Time of a run."""

    seconds: Mapping[str, float]
    """By phase, the longest first."""
    steps: tuple[int, ...]
    """Steps that are done."""
    steps_s: float
    """Of these steps, with validations inside them and without checkpoints."""
    waits: Mapping[str, float]
    """Seconds of generation in vain, by name (`strop.workers.generation_waits`)."""

    @property
    def total(self) -> float:
        """Seconds of the run."""
        return math.fsum(self.seconds.values())

    def of(self, *names: str) -> float:
        """Seconds of these phases together."""
        return math.fsum(self.seconds.get(name, 0.0) for name in names)


def phases_of(records: RunRecords) -> Phases:
    """The phases of a run, as its records were last read."""
    seconds: dict[str, float] = defaultdict(float)
    waits: dict[str, float] = defaultdict(float)
    total = 0.0
    steps: dict[int, float] = {}
    for stretch in _stretches(records.events):
        total += max(0.0, _time(stretch[-1]) - _time(stretch[0]))
        for name, value in _of_start(stretch).items():
            seconds[name] += value
        for before, event in pairwise(stretch):
            is_after_step = before["kind"] == "step" and before["step"] == event["step"]
            if event["kind"] == "validation" and is_after_step:  # of fine-tuning; elsewhere it is a phase
                seconds[TESTING] += max(0.0, _time(event) - _time(before))
            if event["kind"] == PROFILED:
                seconds[PROFILE] += max(0.0, _number(event.get("seconds")))
            if event["kind"] == "step":
                steps[event["step"]] = _number(event.get("seconds"))
                for phase, value in _numbers(event.get("phases")).items():
                    seconds[phase] += value
                for wait, value in _numbers(event.get("waits")).items():
                    waits[wait] += value
    for numbers in records.metrics.values():
        seconds[CHECKPOINT] += _number(numbers.get(_CHECKPOINT_METRIC))
    seconds[OTHER] += max(0.0, total - math.fsum(seconds.values()))
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return Phases(
        seconds={name: value for name, value in ordered if value > 0},
        steps=tuple(sorted(steps)),
        steps_s=math.fsum(steps.values()),
        waits=dict(waits),
    )


def _stretches(events: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """The events of each start of the run, in order."""
    stretch: list[Mapping[str, Any]] = []
    for event in events:
        if event["kind"] in _BEGINS and stretch:
            yield stretch
            stretch = []
        stretch.append(event)
    if stretch:
        yield stretch


def _of_start(stretch: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds before the first step of a start: roles, preflight, validation."""
    seconds: dict[str, float] = defaultdict(float)
    since, has_roles = _time(stretch[0]), False
    for event in stretch[1:]:
        if event["kind"] == "step":
            begin = _time(event) - _number(event.get("seconds"))
            seconds[START] += max(0.0, begin - since)
            break
        if event["kind"] == "validation" and event["step"] > 0:  # inside the step, whose event follows
            continue
        name = {ROLES_STARTED: START, "preflight": PREFLIGHT, "validation": FIRST_VALIDATION}.get(
            event["kind"]
        )
        has_roles = has_roles or event["kind"] == ROLES_STARTED
        if name is not None and has_roles:
            seconds[name] += max(0.0, _time(event) - since)
            since = _time(event)
    return seconds


def _time(event: Mapping[str, Any]) -> float:
    return _number(event.get("time"))


def _number(value: object) -> float:
    return finite(value) or 0.0


def _numbers(values: object) -> dict[str, float]:
    if not isinstance(values, Mapping):
        return {}
    return {str(name): max(0.0, _number(value)) for name, value in values.items()}
