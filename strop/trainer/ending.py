"""What ends a run, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from strop.base.guests import optional
from strop.run import RunFolder
from strop.trainer.sections import TrainerConfig


class Ending:
    """Whether a step is the last one, and why."""

    def __init__(self, run: RunFolder, *, num_steps: int) -> None:
        """Args:
        run: its earlier steps and validations count.
        num_steps: the run ends there in any case.
        """
        self._run, self._num_steps = run, num_steps
        self.reason = ""
        """Why the run is over; empty while it goes on."""

    def look(self, step: int, *, asked: str = "") -> bool:
        """Whether this step, which is trained, is the last one by number, or because a function of the caller's has
        asked for it, and why."""
        if step >= self._num_steps:
            self.reason = f"step {step} is the last one"
        elif asked:
            self.reason = asked
        return bool(self.reason)

    def look_at_validation(self, pass_rate: float | None) -> bool:
        """Whether the run is over with this validation, which is in the records; None: it has no pass rate."""
        return bool(self.reason)


def ending_of(settings: TrainerConfig, run: RunFolder, *, num_steps: int) -> Ending:
    """What knows when a run ends, also by the limits that a guest knows (place "limits of a run")."""
    limited = optional("limits of a run")
    made: Ending = (
        Ending(run, num_steps=num_steps) if limited is None else limited(settings, run, num_steps=num_steps)
    )
    return made


def is_best(run: RunFolder, score: float | None) -> bool:
    """Whether no checkpoint that is kept has a validation as good as this one, by its pass rate, else its mean
    reward."""
    best = run.checkpoints.best()
    return score is not None and (best is None or score > best[1])


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended."""

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
        reward_start=validations.get(0, {}).get("reward"),
        reward_final=final.get("reward"),
    )
