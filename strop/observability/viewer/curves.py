"""The numbers of a run as columns over its steps, and what else they can be drawn against."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from strop.observability.viewer.records import RunRecords
from strop.observability.viewer.summary import SAMPLE_COUNTS, TOKENS

Axis = Literal["step", "samples", "tokens", "hours"]
AXES: tuple[Axis, ...] = ("step", "samples", "tokens", "hours")
"""Choices of the x axis; all but the step are sums over the steps so far."""
REWARD = ("critic/rewards/mean", "critic/score/mean", "train/loss", "prefer/loss")
PASS_RATE = ("val-core/*/acc/mean@*", "val-core/*/reward/mean@*", "val/loss", "val/prefer/rewards/accuracies")


def axis_of(records: RunRecords, axis: Axis) -> dict[int, float]:
    """Position of each step on the axis; a step without the number lies where the one before it does."""
    seconds = {event["step"]: event.get("seconds") for event in records.of_kind("step")}
    places: dict[int, float] = {}
    total = 0.0
    for step in sorted(records.metrics):
        numbers = records.metrics[step]
        if axis == "step":
            total = step
        elif axis == "samples":
            total += math.fsum(numbers.get(name, 0.0) for name in SAMPLE_COUNTS)
        elif axis == "tokens":
            total += numbers.get(TOKENS, 0.0)
        else:
            spent = seconds.get(step, 0.0)
            total += (spent if isinstance(spent, (int, float)) else 0.0) / 3600
        places[step] = total
    return places


def metric_names(records: RunRecords) -> list[str]:
    """All metrics that any step has, in alphabetical order."""
    return sorted({name for numbers in records.metrics.values() for name in numbers})


def column(records: RunRecords, pattern: str) -> dict[int, float]:
    """A metric by step; of a pattern with *, the mean of those that match. Numbers that are not finite are left out."""
    names = fnmatch.filter(metric_names(records), pattern) if "*" in pattern else [pattern]
    values: dict[int, float] = {}
    for step in sorted(records.metrics):
        numbers = records.metrics[step]
        finite = [numbers[name] for name in names if math.isfinite(numbers.get(name, math.nan))]
        if finite:
            values[step] = math.fsum(finite) / len(finite)
    return values


def first_column(records: RunRecords, patterns: Sequence[str]) -> tuple[str, dict[int, float]]:
    """The first of these that the run has; the name is empty where it has none."""
    for pattern in patterns:
        if values := column(records, pattern):
            return pattern, values
    return "", {}


def smoothed(values: Mapping[int, float], count: int) -> dict[int, float]:
    """The mean of each value and those before it, `count` in all (fewer at the beginning)."""
    steps = list(values)
    means: dict[int, float] = {}
    for index, step in enumerate(steps):
        window = [values[other] for other in steps[max(0, index + 1 - count) : index + 1]]
        means[step] = math.fsum(window) / len(window)
    return means
