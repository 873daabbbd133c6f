"""Functions of a caller that hear of a run while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.run import Checkpoint, RunFolder
from strop.trainer.callbacks import Listeners

OnStep = Callable[[int, Mapping[str, float]], object]
"""Takes a step and its metrics. A text that it returns ends the run, and is why."""
OnSamples = Callable[[int, Sequence[Mapping[str, Any]]], object]
"""Takes a step and its samples, as the sample store has them."""
OnCheckpoint = Callable[[int, Path], object]
"""Takes a step and the folder of its checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Functions(Listeners):
    """Callbacks of a caller; each may be left out."""

    on_step: OnStep | None = None
    on_samples: OnSamples | None = None
    on_checkpoint: OnCheckpoint | None = None

    def joined(self, on_step: OnStep) -> Functions:
        """With another one that hears of steps first."""
        before = self.on_step

        def both(step: int, metrics: Mapping[str, float]) -> object:
            on_step(step, metrics)
            return None if before is None else before(step, metrics)

        return replace(self, on_step=both)

    def hear_step(self, run: RunFolder, step: int, metrics: Mapping[str, float]) -> str:
        """A step has ended; why the run is to end, or nothing."""
        if self.on_samples is not None:
            self.on_samples(step, run.samples.read(step))
        answer = None if self.on_step is None else self.on_step(step, metrics)
        return answer if isinstance(answer, str) else ""

    def hear_checkpoint(self, checkpoint: Checkpoint) -> None:
        """A checkpoint is whole."""
        if self.on_checkpoint is not None:
            self.on_checkpoint(checkpoint.step, checkpoint.path)
