"""How a run ended, as its records say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from strop.run import RunFolder


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
