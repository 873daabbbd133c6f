"""Early stopping (time, pass rate, patience), and the result of a run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.run import RunFolder
from strop.trainer.sections import TrainerConfig

logger = logging.getLogger(__name__)


class EarlyStopping:
    """Early stopping: decides if a step is the last one, by number, by the caller, or by a limit of the settings (the
    hours that a run may take, the pass rate that it should reach, patience).

    All of it follows from the records of the run, so a run that is continued ends where it would have ended without the
    break; only the time between its starts does not count.
    """

    def __init__(self, settings: TrainerConfig, run: RunFolder, *, num_steps: int) -> None:
        """Begin to count the hours.

        Args:
            settings: the limits.
            run: its earlier steps and validations count.
            num_steps: the run ends there in any case.
        """
        self._run, self._num_steps = run, num_steps
        self.reason = ""
        """Reason for the end of the run; empty while it goes on."""
        self._settings = settings
        self._start = time.perf_counter() - run.seconds_of_steps()
        self._has_warned = False
        trained = [event["pass_rate"] for event in run.events.read("validation") if event["step"] > 0]
        if trained:  # what was recorded before a crash, or before a setting was given anew
            self.check_validation(trained[-1])

    def check(self, step: int, *, stop_reason: str = "") -> bool:
        """True when this step, which is trained, is the last one: by time, by number, or for the stop_reason of a
        callback."""
        limit = self._settings.max_hours
        hours = (time.perf_counter() - self._start) / 3600
        if limit is not None and hours >= limit:
            self.reason = f"trainer.max_hours={limit:g}: it has trained for {hours:.3g} hours"
        elif step >= self._num_steps:
            self.reason = f"step {step} is the last one"
        elif stop_reason:
            self.reason = stop_reason
        return bool(self.reason)

    def check_validation(self, pass_rate: float | None) -> bool:
        """True when the run ends with this validation, which is in the records; None: it has no pass rate."""
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


def is_best(run: RunFolder, score: float | None) -> bool:
    """True when no kept checkpoint has a validation as good as this one, by its pass rate, else its mean reward."""
    best = run.checkpoints.best()
    return score is not None and (best is None or score > best[1])


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of a run."""

    run: Path
    steps: int
    seconds: float
    """Wall-clock time of the last process that trained, with the steps of those before it."""
    pass_rate_start: float | None
    """Validation before the first step; None without validation data, and where nothing decides which answers pass."""
    pass_rate_final: float | None
    interval_final: tuple[float, float] | None = None
    """95 % Wilson interval of that."""
    best: tuple[int, float] | None = None
    """Step of the best checkpoint that is kept with its pass rate, else its mean reward; None where no checkpoint has a
    validation."""
    reward_start: float | None = None
    """Mean reward of the validation before the first step."""
    reward_final: float | None = None


def train_result(run: RunFolder) -> TrainResult:
    """Result of a finished run, from its records."""
    end = run.events.read("finished")[-1]
    validations = {event["step"]: event for event in run.events.read("validation")}
    final = validations.get(end["step"], {})
    low, high = final.get("low"), final.get("high")
    return TrainResult(
        run=run.path,
        steps=end["step"],
        seconds=end["seconds"],
        pass_rate_start=validations.get(0, {}).get("pass_rate"),
        pass_rate_final=final.get("pass_rate"),
        interval_final=(low, high) if isinstance(low, float) and isinstance(high, float) else None,
        best=run.checkpoints.best(),
        reward_start=validations.get(0, {}).get("reward"),
        reward_final=final.get("reward"),
    )


def ranks_of(validations: Sequence[Mapping[str, Any]]) -> tuple[list[float], bool]:
    """The numbers by which these validations are compared, and whether they are pass rates: where one of them has none,
    all are compared by their mean rewards."""
    rates = [event.get("pass_rate") for event in validations]
    if all(rate is not None for rate in rates):
        return [float(rate) for rate in rates if rate is not None], True
    rewards = [event.get("reward") for event in validations]
    return [-math.inf if reward is None else float(reward) for reward in rewards], False


def has_stalled(numbers: Sequence[float], patience: int) -> bool:
    """True when none of the last `patience` validations was better than the best one before them."""
    return len(numbers) > patience and max(numbers[-patience:]) <= max(numbers[:-patience])
