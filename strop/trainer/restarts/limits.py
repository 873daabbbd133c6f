"""What ends a run before its last step: the hours it may take, the pass rate it should reach, patience.

All of it follows from the records of the run, so a run that is continued ends where it would have ended without the
break; only the time between its starts does not count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from strop.base.sections import section_of
from strop.run import RunFolder
from strop.trainer.ending import Ending
from strop.trainer.restarts.settings import EndingSettings
from strop.trainer.sections import TrainerConfig


class LimitedEnding(Ending):
    """As Ending, with trainer.max_hours, target_pass_rate and patience."""

    def __init__(self, settings: TrainerConfig, run: RunFolder, *, num_steps: int) -> None:
        """Begin to count the hours.

        Args:
            settings: the limits.
            run, num_steps: as of Ending.
        """
        super().__init__(run, num_steps=num_steps)
        self._settings = section_of(settings, EndingSettings)
        self._earlier_s = sum(float(event["seconds"]) for event in run.events.read("step"))
        self._start = time.perf_counter()
        trained = [event["pass_rate"] for event in run.events.read("validation") if event["step"] > 0]
        if trained:  # what was recorded before a crash, or before a setting was given anew
            self.look_at_validation(float(trained[-1]))

    def look(self, step: int, *, asked: str = "") -> bool:
        """As Ending; or the last one by time."""
        limit = self._settings.max_hours
        hours = (self._earlier_s + time.perf_counter() - self._start) / 3600
        if limit is not None and hours >= limit:
            self.reason = f"trainer.max_hours={limit:g}: it has trained for {hours:.3g} hours"
            return True
        return super().look(step, asked=asked)

    def look_at_validation(self, pass_rate: float) -> bool:
        """Whether the run is over with this validation, which is in the records."""
        target, patience = self._settings.target_pass_rate, self._settings.patience
        rates = [float(event["pass_rate"]) for event in self._run.events.read("validation")]
        if target is not None and pass_rate >= target:
            self.reason = f"trainer.target_pass_rate={target:g} is reached: {100 * pass_rate:.1f} %"
        elif patience is not None and has_stalled(rates, patience):
            self.reason = (
                f"trainer.patience={patience}: no validation since was better than {100 * max(rates):.1f} %"
            )
        return bool(self.reason)


def has_stalled(rates: Sequence[float], patience: int) -> bool:
    """Whether none of the last `patience` validations was better than the best one before them."""
    return len(rates) > patience and max(rates[-patience:]) <= max(rates[:-patience])
