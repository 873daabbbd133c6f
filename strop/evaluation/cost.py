"""What a training had spent by a step, from the records of its run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from strop.observability.trackers.setup import METRICS_FILE, read_metrics
from strop.run import RunFolder
from strop.run.processes import processes_of
from strop.utils.sanitize import finite
from strop.workers.metrics import NUM_TOKENS


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Of a run, from its first step to the end of one."""

    tokens: float
    """Of all prompts and responses."""
    device_hours: float | None
    """Time of the steps, times the processes of the run; None where the run does not say how many there were."""

    def less(self, other: Spent) -> Spent:
        """What came after the other one."""
        known = self.device_hours is not None and other.device_hours is not None
        hours = (self.device_hours or 0.0) - (other.device_hours or 0.0) if known else None
        return Spent(tokens=self.tokens - other.tokens, device_hours=hours)


def spent_by(run: RunFolder, step: int) -> Spent | None:
    """What the steps up to this one took; None where a step left no record.

    Args:
        run: its folder.
        step: 0 is before the first one.
    """
    seconds = {one["step"]: finite(one.get("seconds")) or 0.0 for one in run.events.read("step")}
    file = run.path / METRICS_FILE
    numbers = {int(one["step"]): one for one in (read_metrics(file) if file.is_file() else [])}
    wanted = range(1, step + 1)
    if any(one not in seconds or NUM_TOKENS not in numbers.get(one, {}) for one in wanted):
        return None
    config = run.info.get("config")
    processes = processes_of(config) if isinstance(config, Mapping) else 0
    hours = math.fsum(seconds[one] for one in wanted) * processes / 3600
    return Spent(
        tokens=math.fsum(numbers[one][NUM_TOKENS] for one in wanted),
        device_hours=hours if processes else None,
    )
