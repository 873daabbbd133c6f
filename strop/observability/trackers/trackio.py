"""Trackio: a database below TRACKIO_DIR (default: the cache of Hugging Face), shown by `trackio show`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.observability.trackers.async_logger import Remote, as_columns, make_async_tracker


class Trackio(Remote):
    """A run by its name; a resume goes on with it."""

    name = package = "trackio"

    def begin(self) -> None:
        """`trackio.init`."""
        import trackio

        self._trackio: Any = trackio
        trackio.init(
            project=self.project,
            name=f"{self.metadata.name}-{self.metadata.id}",
            config=dict(self.metadata.config),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of a step."""
        self._trackio.log(dict(metrics), step=step)

    def log_samples(self, step: int, split: str, rows: Sequence[Sequence[Any]]) -> None:
        """A table."""
        import pandas as pd  # half a second

        table = self._trackio.Table(dataframe=pd.DataFrame(as_columns(rows)))
        self._trackio.log({f"samples/{split}": table}, step=step)

    def log_curve(self, picture: Path) -> None:
        """An image."""
        self._trackio.log({"curve": self._trackio.Image(str(picture))})

    def end(self) -> None:
        """Write what is left."""
        self._trackio.finish()


TrackioTracker = make_async_tracker(Trackio)
