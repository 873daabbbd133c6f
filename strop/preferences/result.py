"""How a training on preferences ended, as its records say."""

from __future__ import annotations

from typing import Any

from strop.border import as_number
from strop.run import RunFolder
from strop.supervised.result import sft_result_of


def record_of(run: RunFolder) -> dict[str, Any]:
    """What the commands print as JSON; the accuracies are None without validation data, and with loss=kto."""
    result = sft_result_of(run)
    validations = run.events.read("validation")
    first = validations[0] if validations and validations[0]["step"] == 0 else {}
    last = validations[-1] if validations else {}
    return {
        "run": str(result.run),
        "model": str(result.model),
        "steps": result.steps,
        "seconds": round(result.seconds, 2),
        "loss": result.loss,
        "val_loss": result.val_loss,
        "accuracy_start": _accuracy(first),
        "accuracy_final": _accuracy(last),
    }


def _accuracy(validation: dict[str, Any]) -> float | None:
    found = validation.get("accuracy")
    return None if found is None else as_number(found)
