"""Steps whose time is counted in steps of the engine: trainer.clock=virtual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strop.ahead.calls import calls
from strop.base.metrics import Metric
from strop.controller import as_list
from strop.trainer.collecting import RolloutCollector
from strop.workers.reports import EpisodeReport

CLOCK_STEPS = Metric(
    "training/off_policy/clock_steps",
    "engine steps",
    "since the step before, with trainer.clock=virtual: how long a step takes by that clock, the training not counted",
)


class ClockedCollector(RolloutCollector):
    """Fills steps with samples, and counts the time of such a clock where there is one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As RolloutCollector."""
        super().__init__(*args, **kwargs)
        self._clock_steps = 0

    def _noted(self, reports: Sequence[EpisodeReport]) -> dict[str, float]:
        noted = super()._noted(reports)
        if self._config.trainer.clock == "wall":
            return noted
        now = max(as_list(calls(self._roles).clock_steps()))
        passed, self._clock_steps = now - self._clock_steps, now
        return noted | {CLOCK_STEPS: float(passed)}
