"""Result of a fine-tuning run, from its records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from strop.run import RunFolder
from strop.utils.sanitize import as_number


@dataclass(frozen=True, kw_only=True)
class SftResult:
    """Result of a fine-tuning run."""

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


def sft_result(run: RunFolder) -> SftResult:
    """Result of a finished fine-tuning run, from its records."""
    end = run.events.read("finished")[-1]
    val_loss = end.get("val_loss")
    return SftResult(
        run=run.path,
        steps=end["step"],
        seconds=end["seconds"],
        loss=as_number(end.get("loss")),
        val_loss=None if val_loss is None else as_number(val_loss),
    )
