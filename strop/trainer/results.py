"""How a run ended, as its records say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from strop.border import as_number
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


@dataclass(frozen=True, kw_only=True)
class SftResult:
    """How a fine-tuning ended."""

    run: Path
    steps: int
    seconds: float
    loss: float
    """Mean loss per trained token of the last step."""
    val_loss: float | None
    """The same on validation data; None without any."""

    @property
    def model(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.run / "checkpoints" / f"global_step_{self.steps}" / "model"


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


def sft_result_of(run: RunFolder) -> SftResult:
    """How a finished fine-tuning ended, from its records."""
    end = run.events.read("finished")[-1]
    loss, val_loss = end.get("loss"), end.get("val_loss")
    return SftResult(
        run=run.path,
        steps=end["step"],
        seconds=end["seconds"],
        loss=math.nan if loss is None else as_number(loss),
        val_loss=None if val_loss is None else as_number(val_loss),
    )
