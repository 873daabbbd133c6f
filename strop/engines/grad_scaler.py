"""The factor that keeps gradients in the range of float16 (model.dtype=float16).

float16 has no number between 0 and 6e-8, and none above 65504: gradients of a loss as it is vanish in the backward
pass. So the loss is multiplied by a factor, and the gradients, which are added up in float32, are divided by it before
they are clipped. A gradient that is not finite says that the factor was too large: the step is skipped, and the factor
halved.

Concurrency: all ranks see the same gradient norm (engines/gradients.py), so their factors stay the same without a word.

Source: Micikevicius et al. 2017, arXiv:1710.03740, section 3.2, with a factor that adapts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIRST = 2.0**16
"""The factor of the first step; too large for most losses, which costs a skipped step for each halving."""
LARGEST = 2.0**24
SMALLEST = 1.0
GROWTH_STEPS = 400
"""Steps without an overflow after which the factor is doubled. Runs have hundreds of steps, so fewer than the 2000 of
torch's GradScaler; as many as in verl."""


class LossScale:
    """The factor, and the steps since it was changed."""

    def __init__(self) -> None:
        self.value = FIRST
        self._num_good = 0

    def update(self, *, is_finite: bool) -> None:
        """A step was taken, or skipped for a gradient that is not finite."""
        self._num_good = self._num_good + 1 if is_finite else 0
        if not is_finite:
            self.value = max(SMALLEST, self.value / 2)
        elif self._num_good == GROWTH_STEPS:
            self.value, self._num_good = min(LARGEST, self.value * 2), 0

    def state(self) -> dict[str, float]:
        """State for a continuation."""
        return {"loss_scale": self.value, "loss_scale_steps": self._num_good}

    def load_state(self, numbers: Mapping[str, Any]) -> None:
        """Continue from `state()`; from a run in another precision, begin anew."""
        self.value = float(numbers.get("loss_scale", FIRST))
        self._num_good = int(numbers.get("loss_scale_steps", 0))
