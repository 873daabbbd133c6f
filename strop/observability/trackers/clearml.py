"""ClearML. CLEARML_OFFLINE_MODE=1 keeps the task in its cache, for `Task.import_offline_session`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.observability.trackers.async_logger import Remote, as_columns, make_async_tracker

_AUTO_CONNECT_OFF = dict.fromkeys(
    ("detect_repository", "catboost", "fastai", "gradio", "hydra", "joblib", "lightgbm", "matplotlib", "megengine",
     "pytorch", "scikit", "tensorboard", "tensorflow", "tfdefines", "xgboost"), False,
)  # fmt: skip
"""Automatic captures of ClearML, all off. Its search for a repository, which False alone does not stop, can
take minutes."""


class Clearml(Remote):
    """A task; a resume goes on with it."""

    name = package = "clearml"

    def begin(self) -> None:
        """`Task.init`, with nothing of the process connected by itself."""
        from clearml import Task

        run_id = self.metadata.stored_id(self.name)
        self._task: Any = Task.init(
            project_name=self.project,
            task_name=self.metadata.name,
            reuse_last_task_id=False,
            continue_last_task=run_id or False,
            auto_connect_frameworks=_AUTO_CONNECT_OFF,
            auto_connect_arg_parser=False,
            auto_connect_streams=False,
            auto_resource_monitoring=False,
        )
        self.metadata.store_id(self.name, self._task.id)
        self._task.set_parameters(
            {f"strop/{key}": value for key, value in self.metadata.flat_config().items()}
        )
        self._logger: Any = self._task.get_logger()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Each number in the plot of its first words."""
        for name, value in metrics.items():
            title, _, series = name.rpartition("/")
            self._logger.report_scalar(title or series, series, value=value, iteration=step)

    def log_samples(self, step: int, split: str, rows: Sequence[Sequence[Any]]) -> None:
        """A table."""
        import pandas as pd  # half a second

        self._logger.report_table("samples", split, iteration=step, table_plot=pd.DataFrame(as_columns(rows)))

    def log_curve(self, picture: Path) -> None:
        """An image."""
        self._logger.report_image("curve", "curve", iteration=0, local_path=str(picture))

    def end(self) -> None:
        """Send what is left."""
        self._task.close()


ClearmlTracker = make_async_tracker(Clearml)
