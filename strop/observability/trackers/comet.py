"""Comet. Without COMET_API_KEY the experiment is kept below the run folder; `comet upload` sends it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.observability.trackers.async_logger import Remote, make_async_tracker
from strop.observability.trackers.run_metadata import COLUMNS, in_folder

_OFF = ("auto_param_logging", "auto_metric_logging", "log_code", "log_graph", "log_git_metadata", "parse_args",
        "auto_output_logging", "log_env_details")  # fmt: skip


class Comet(Remote):
    """An experiment; a resume goes on with it."""

    name = "comet"
    package = "comet_ml"
    project_variable = "COMET_PROJECT_NAME"

    def begin(self) -> None:
        """An experiment of one of four classes: new or continued, online or offline."""
        import comet_ml

        run_id = self.metadata.stored_id(self.name)
        options: dict[str, Any] = {**dict.fromkeys(_OFF, False), "display_summary_level": 0}
        if os.environ.get("COMET_API_KEY"):
            experiment_class = comet_ml.ExistingExperiment if run_id else comet_ml.Experiment
        else:
            experiment_class = comet_ml.ExistingOfflineExperiment if run_id else comet_ml.OfflineExperiment
            options["offline_directory"] = in_folder(
                self.metadata.folder / "comet", "COMET_OFFLINE_DIRECTORY"
            )
        options |= {"previous_experiment": run_id} if run_id else {"project_name": self.project}
        self._experiment: Any = experiment_class(**options)
        self._experiment.set_name(self.metadata.name)
        self._experiment.log_parameters(self.metadata.flat_config())
        self.metadata.store_id(self.name, self._experiment.get_key())

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of a step."""
        self._experiment.log_metrics(dict(metrics), step=step)

    def log_samples(self, step: int, split: str, rows: Sequence[Sequence[Any]]) -> None:
        """A table of its own for each step."""
        self._experiment.log_table(
            f"samples-{split}-{step:06d}.csv", tabular_data=[list(row) for row in rows], headers=list(COLUMNS)
        )

    def log_curve(self, picture: Path) -> None:
        """An image."""
        self._experiment.log_image(str(picture), name="curve")

    def end(self) -> None:
        """Send what is left."""
        self._experiment.end()


CometTracker = make_async_tracker(Comet)
