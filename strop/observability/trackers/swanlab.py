"""SwanLab. SWANLAB_MODE=offline or local keeps the run below the run folder; `swanlab sync` sends it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.observability.trackers.async_logger import Remote, make_async_tracker
from strop.observability.trackers.run_metadata import COLUMNS, in_folder

_ID_CHARS = 21


class Swanlab(Remote):
    """An experiment whose id follows from ours, so that a resume goes on with it."""

    name = package = "swanlab"
    project_variable = "SWANLAB_PROJ_NAME"

    def begin(self) -> None:
        """`swanlab.init`."""
        os.environ.setdefault(
            "SWANLAB_INTERACTIVE", "false"
        )  # without a key it would ask for one, from this thread
        import swanlab

        self._swanlab: Any = swanlab
        swanlab.init(
            project=self.project,
            experiment_name=self.metadata.name,
            id=hashlib.sha256(self.metadata.id.encode()).hexdigest()[:_ID_CHARS],
            resume="allow",
            config=dict(self.metadata.config),
            logdir=in_folder(self.metadata.folder / "swanlog", "SWANLAB_LOG_DIR"),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of a step."""
        self._swanlab.log(dict(metrics), step=step)

    def log_samples(self, step: int, split: str, rows: Sequence[Sequence[Any]]) -> None:
        """A text per sample."""
        texts = [
            self._swanlab.Text(
                "\n".join(f"{name}: {value}" for name, value in zip(COLUMNS, row, strict=True))
            )
            for row in rows
        ]
        self._swanlab.log({f"samples/{split}": texts}, step=step)

    def log_curve(self, picture: Path) -> None:
        """An image."""
        self._swanlab.log({"curve": self._swanlab.Image(str(picture))})

    def end(self) -> None:
        """Send what is left."""
        self._swanlab.finish()


SwanlabTracker = make_async_tracker(Swanlab)
