"""Steps whose time is counted in steps of the engine: trainer.clock=virtual."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from strop.controller import as_list
from strop.trainer.async_rollout.calls import calls
from strop.trainer.records import StepRecord
from strop.trainer.rounds.collector import RoundsCollector
from strop.trainer.timing import Stages
from strop.utils.metrics import Metric

CLOCK_STEPS = Metric(
    "training/off_policy/clock_steps",
    "engine steps",
    "since the step before, with trainer.clock=virtual: how long a step takes by that clock, the training not counted",
)


class ClockedCollector(RoundsCollector):
    """Fills steps with samples, and counts the time of such a clock where there is one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As RoundsCollector."""
        super().__init__(*args, **kwargs)
        self._clock_steps = 0

    def collect(self, step: int, stages: Stages, num_prompts: int | None = None) -> StepRecord:
        """As RoundsCollector."""
        return self._clocked(super().collect(step, stages, num_prompts))

    def _clocked(self, collected: StepRecord) -> StepRecord:
        """With CLOCK_STEPS."""
        if self._config.trainer.clock == "wall":
            return collected
        now = max(as_list(calls(self._roles).clock_steps()))
        passed, self._clock_steps = now - self._clock_steps, now
        return replace(
            collected, collection_metrics={**collected.collection_metrics, CLOCK_STEPS: float(passed)}
        )
