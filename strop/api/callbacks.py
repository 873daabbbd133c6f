"""Callbacks of a caller in Python, made of plain functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from strop.run import Checkpoint, RunFolder
from strop.trainer.callbacks import Callbacks

OnStep = Callable[[int, Mapping[str, float]], object]
"""Takes a step and its metrics. A text that it returns ends the run, and is why."""
OnSamples = Callable[[int, Sequence[Mapping[str, Any]]], object]
"""Takes a step and its samples, as the sample store has them."""
OnCheckpoint = Callable[[int, Path], object]
"""Takes a step and the folder of its checkpoint."""


@dataclass(frozen=True, kw_only=True)
class FunctionCallbacks(Callbacks):
    """Callbacks made of functions of the caller; each may be left out."""

    on_step: OnStep | None = None
    on_samples: OnSamples | None = None
    on_checkpoint: OnCheckpoint | None = None

    def __post_init__(self) -> None:
        for name in ("on_step", "on_samples", "on_checkpoint"):
            if not callable(getattr(self, name) or print):
                raise ValueError(f"{name} is a {type(getattr(self, name)).__name__}: give a function")

    def joined(self, on_step: OnStep) -> FunctionCallbacks:
        """The same with another function that is called for each step first."""
        before = self.on_step

        def both(step: int, metrics: Mapping[str, float]) -> object:
            on_step(step, metrics)
            return None if before is None else before(step, metrics)

        return replace(self, on_step=both)

    def on_step_end(self, run: RunFolder, step: int, metrics: Mapping[str, float]) -> str:
        """Called after a step; gives a reason to end the run, or an empty text."""
        if self.on_samples is not None:
            self.on_samples(step, run.samples.read(step))
        answer = None if self.on_step is None else self.on_step(step, metrics)
        return answer if isinstance(answer, str) else ""

    def on_save(self, checkpoint: Checkpoint) -> None:
        """Called when a checkpoint is complete."""
        if self.on_checkpoint is not None:
            self.on_checkpoint(checkpoint.step, checkpoint.path)
