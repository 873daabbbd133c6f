"""Limits of a run: the hours it may take, the pass rate it should reach, patience.

All of it follows from the records of the run, so a run that is continued ends where it would have ended without the
break; only the time between its starts does not count.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from strop.base.sections import section_of
from strop.run import RunFolder
from strop.trainer.ending import Ending
from strop.trainer.restarts.settings import EndingSettings
from strop.trainer.sections import TrainerConfig

logger = logging.getLogger(__name__)


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
        self._start = time.perf_counter() - run.seconds_of_steps()
        self._has_warned = False
        trained = [event["pass_rate"] for event in run.events.read("validation") if event["step"] > 0]
        if trained:  # what was recorded before a crash, or before a setting was given anew
            self.look_at_validation(trained[-1])

    def look(self, step: int, *, asked: str = "") -> bool:
        """As Ending; or the last one by time."""
        limit = self._settings.max_hours
        hours = (time.perf_counter() - self._start) / 3600
        if limit is not None and hours >= limit:
            self.reason = f"trainer.max_hours={limit:g}: it has trained for {hours:.3g} hours"
            return True
        return super().look(step, asked=asked)

    def look_at_validation(self, pass_rate: float | None) -> bool:
        """Whether the run is over with this validation, which is in the records; None: it has no pass rate."""
        target, patience = self._settings.target_pass_rate, self._settings.patience
        if target is not None and pass_rate is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "trainer.target_pass_rate=%g cannot end this run: nothing says which answers pass; give `acc` in the "
                "reward function, or set reward.pass_by", target,
            )  # fmt: skip
        if target is not None and pass_rate is not None and pass_rate >= target:
            self.reason = f"trainer.target_pass_rate={target:g} is reached: {100 * pass_rate:.1f} %"
        elif patience is not None:
            numbers, are_rates = ranks_of(self._run.events.read("validation"))
            if has_stalled(numbers, patience):
                best = f"{100 * max(numbers):.1f} %" if are_rates else f"a mean reward of {max(numbers):.4g}"
                self.reason = f"trainer.patience={patience}: no validation since was better than {best}"
        return bool(self.reason)


def ranks_of(validations: Sequence[Mapping[str, Any]]) -> tuple[list[float], bool]:
    """The numbers by which these validations are compared, and whether they are pass rates: where one of them has none,
    all are compared by their mean rewards."""
    rates = [event.get("pass_rate") for event in validations]
    if all(rate is not None for rate in rates):
        return [float(rate) for rate in rates if rate is not None], True
    rewards = [event.get("reward") for event in validations]
    return [-math.inf if reward is None else float(reward) for reward in rewards], False


def has_stalled(numbers: Sequence[float], patience: int) -> bool:
    """Whether none of the last `patience` validations was better than the best one before them."""
    return len(numbers) > patience and max(numbers[-patience:]) <= max(numbers[:-patience])
