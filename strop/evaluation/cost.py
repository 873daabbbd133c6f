"""Tokens and device-hours of a training up to a step, from the records of its run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from strop.observability.trackers.setup import METRICS_FILE, read_metrics
from strop.run import RunFolder
from strop.run.processes import num_processes
from strop.utils.sanitize import finite
from strop.workers.metrics import NUM_TOKENS


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """Cost of a run from its first step to the end of one."""

    tokens: float
    """Of all prompts and responses."""
    device_hours: float | None
    """Time of the steps, times the processes of the run; None where their number is unknown."""

    def less(self, earlier: TrainingCost) -> TrainingCost:
        """Cost after an earlier step."""
        has_hours = self.device_hours is not None and earlier.device_hours is not None
        hours = (self.device_hours or 0.0) - (earlier.device_hours or 0.0) if has_hours else None
        return TrainingCost(tokens=self.tokens - earlier.tokens, device_hours=hours)


def training_cost(run: RunFolder, step: int) -> TrainingCost | None:
    """Cost of the steps up to this one; None where a step left no record.

    Args:
        run: its folder.
        step: 0 is before the first one.
    """
    seconds = {record["step"]: finite(record.get("seconds")) or 0.0 for record in run.events.read("step")}
    file = run.path / METRICS_FILE
    numbers = {int(record["step"]): record for record in (read_metrics(file) if file.is_file() else [])}
    steps = range(1, step + 1)
    if any(number not in seconds or NUM_TOKENS not in numbers.get(number, {}) for number in steps):
        return None
    config = run.info.get("config")
    processes = num_processes(config) if isinstance(config, Mapping) else 0
    hours = math.fsum(seconds[number] for number in steps) * processes / 3600
    return TrainingCost(
        tokens=math.fsum(numbers[number][NUM_TOKENS] for number in steps),
        device_hours=hours if processes else None,
    )
