"""MLflow, at MLFLOW_TRACKING_URI: a server, or a database such as sqlite:///mlflow.db."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.observability.trackers.async_logger import Remote, as_columns, make_async_tracker, now_ms

_ILLEGAL = re.compile(r"[^\w\-./ :]")
_MAX_PARAM_CHARS = 6000
_MAX_PARAMS_PER_REQUEST = 100
_MAX_METRICS_PER_REQUEST = 200
"""Parameters and metrics that a server takes in one request: MLflow takes 1000 metrics, Azure's 200."""
_MAX_NAME_CHARS = 250


def legal_name(name: str) -> str:
    """A name that MLflow takes: it may become the path of a file there, and a data source may be an address."""
    parts = [_ILLEGAL.sub("_", part) for part in name.split("/") if part]
    path = "/".join("_" * len(part) if part in (".", "..") else part for part in parts)
    return path if len(path) <= _MAX_NAME_CHARS else _shortened(path)


def _shortened(path: str) -> str:
    """A long name without its middle; what tells it from others, and the metric at its end, stay."""
    digest = hashlib.sha256(path.encode()).hexdigest()[:8]
    half = (_MAX_NAME_CHARS - len(digest) - 2) // 2
    return f"{path[:half].rstrip('/')}_{digest}_{path[-half:].lstrip('/')}"


class Mlflow(Remote):
    """A run of an experiment that is named like the project."""

    name = package = "mlflow"
    project_variable = "MLFLOW_EXPERIMENT_NAME"

    def begin(self) -> None:
        """A run, or the one of before the resume."""
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client: Any = MlflowClient()
        run_id = self.metadata.stored_id(self.name)
        if run_id is not None:
            self._id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(self.project)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(self.project)
        )
        tags = {"strop.run": self.metadata.id}
        self._id = self._client.create_run(experiment_id, run_name=self.metadata.name, tags=tags).info.run_id
        self.metadata.store_id(self.name, self._id)
        params = [
            Param(legal_name(key), value[:_MAX_PARAM_CHARS])
            for key, value in self.metadata.flat_config().items()
        ]
        for start in range(0, len(params), _MAX_PARAMS_PER_REQUEST):
            self._client.log_batch(self._id, params=params[start : start + _MAX_PARAMS_PER_REQUEST])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """All numbers, as many in one request as a server takes."""
        now = now_ms()
        renamed = {legal_name(name): value for name, value in metrics.items()}
        points = [self._metric(name, value, now, step) for name, value in renamed.items()]
        for start in range(0, len(points), _MAX_METRICS_PER_REQUEST):
            self._client.log_batch(self._id, metrics=points[start : start + _MAX_METRICS_PER_REQUEST])

    def log_samples(self, step: int, split: str, rows: Sequence[Sequence[Any]]) -> None:
        """A table of its own for each step: to add to one is to fetch it first."""
        self._client.log_table(self._id, as_columns(rows), f"samples/{split}-{step:06d}.json")

    def log_curve(self, picture: Path) -> None:
        """A file of the run."""
        self._client.log_artifact(self._id, str(picture))

    def end(self) -> None:
        """The run is over."""
        self._client.set_terminated(self._id)


MlflowTracker = make_async_tracker(Mlflow)
