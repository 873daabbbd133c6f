"""Weights & Biases. WANDB_MODE=offline keeps the run below the run folder; `wandb sync` sends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.observability.trackers.async_logger import Remote, make_async_tracker
from strop.observability.trackers.run_metadata import COLUMNS, in_folder


class Wandb(Remote):
    """A run of wandb with the id of ours, so that a resume goes on with it."""

    name = package = "wandb"
    project_variable = "WANDB_PROJECT"

    def begin(self) -> None:
        """`wandb.init`; numbers are drawn against our steps, which a resume may take back."""
        import wandb

        self._wandb: Any = wandb
        wandb.setup(wandb.Settings(silent=True))  # without a key it would ask for one, from this thread
        self._run: Any = wandb.init(
            project=self.project,
            name=self.metadata.name,
            id=self.metadata.id,
            resume="allow",
            config=dict(self.metadata.config),
            dir=in_folder(self.metadata.folder, "WANDB_DIR"),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row of its history."""
        self._run.log({"step": step, **metrics})

    def log_samples(self, step: int, split: str, rows: Sequence[Sequence[Any]]) -> None:
        """A table."""
        table = self._wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._run.log({"step": step, f"samples/{split}": table})

    def log_curve(self, picture: Path) -> None:
        """An image."""
        self._run.log({"curve": self._wandb.Image(str(picture))})

    def end(self) -> None:
        """Send what is left."""
        self._run.finish()


WandbTracker = make_async_tracker(Wandb)
