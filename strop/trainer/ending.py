"""What ends a run before its last step, the hours it may take, the pass rate it should reach, patience; and how a run
ended.

All of it follows from the records of the run, so a run that is continued ends where it would have ended without the
break; only the time between its starts does not count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.base.guests import needed
from strop.run import RunConfig, RunFolder
from strop.trainer.sections import TrainerConfig


class Ending:
    """Whether a step is the last one, and why."""

    def __init__(self, settings: TrainerConfig, run: RunFolder, *, num_steps: int) -> None:
        """Begin to count the hours.

        Args:
            settings: max_hours, target_pass_rate, patience.
            run: its earlier steps and validations count.
            num_steps: the run ends there in any case.
        """
        self._settings, self._run, self._num_steps = settings, run, num_steps
        self._earlier_s = sum(float(event["seconds"]) for event in run.events.read("step"))
        self._start = time.perf_counter()
        self.reason = ""
        """Why the run is over; empty while it goes on."""
        trained = [event["pass_rate"] for event in run.events.read("validation") if event["step"] > 0]
        if trained:  # what was recorded before a crash, or before a setting was given anew
            self.look_at_validation(float(trained[-1]))

    def look(self, step: int, *, asked: str = "") -> bool:
        """Whether this step, which is trained, is the last one by number or by time, or because a function of the
        caller's has asked for it, and why."""
        limit = self._settings.max_hours
        hours = (self._earlier_s + time.perf_counter() - self._start) / 3600
        if limit is not None and hours >= limit:
            self.reason = f"trainer.max_hours={limit:g}: it has trained for {hours:.3g} hours"
        elif step >= self._num_steps:
            self.reason = f"step {step} is the last one"
        elif asked:
            self.reason = asked
        return bool(self.reason)

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


def is_best(run: RunFolder, pass_rate: float) -> bool:
    """Whether no checkpoint that is kept has a validation as good as this one."""
    best = run.checkpoints.best()
    return best is None or pass_rate > best[1]


def machine_end(settings: RunConfig) -> Any:
    """What knows when the machine is taken away (place "end of the machine"); None without run.save_before.

    Raises:
        ValueError: it cannot be known, as a variable has something else than a time.
    """
    if not settings.save_before:
        return None
    return needed("end of the machine", "run.save_before is set")(settings)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended."""

    run: Path
    steps: int
    seconds: float
    """Wall-clock time of this process; of a resumed run, since the resume."""
    pass_rate_start: float | None
    """Validation before the first step; None without validation data."""
    pass_rate_final: float | None
    interval_final: tuple[float, float] | None = None
    """95 % Wilson interval of that."""
    best: tuple[int, float] | None = None
    """Step and pass rate of the best checkpoint that is kept; None where no checkpoint has a validation."""


def result_of(run: RunFolder) -> TrainResult:
    """How a finished run ended, from its records."""
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
    )
