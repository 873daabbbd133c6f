"""Metadata of a run for trackers, beside its metrics: name and settings, samples of its validations, its curve."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.observability.reward_curve import run_series, save_curve
from strop.observability.trackers.setup import METRICS_FILE, TrackerSetup, read_metrics
from strop.run import RunError
from strop.run.folder import RUN_FILE, SAMPLES
from strop.run.samples import SampleStore
from strop.utils.atomic_io import replace_text
from strop.utils.safe_read import read_json
from strop.utils.sanitize import as_number

IDS_FILE = "trackers.json"
COLUMNS = ("step", "id", "prompt", "response", "score", "reward_parts", "fate")
"""Columns of a table of samples."""
MAX_SAMPLES = 32
"""Most rows of a table, of a validation and of the training step with it."""
_MAX_CHARS = 4000


@dataclass(frozen=True, kw_only=True)
class RunMetadata:
    """Metadata of one run for trackers: name, settings, samples and reward curve."""

    folder: Path
    id: str
    project: str
    name: str
    config: Mapping[str, Any]
    resume_step: int = 0
    is_upload: bool = False
    """True where `strop track` sends a recorded run as a new one: ids of trackers are neither read nor stored."""

    @staticmethod
    def read(setup: TrackerSetup, *, is_upload: bool = False) -> RunMetadata:
        """Read the metadata from the run folder of a tracker's setup."""
        info = read_json(setup.folder / RUN_FILE)
        return RunMetadata(
            folder=setup.folder,
            id=f"{info['id']}-{int(time.time())}" if is_upload else str(info["id"]),
            is_upload=is_upload,
            project=setup.project,
            name=setup.name or setup.folder.resolve().name,
            config=info.get("config", {}),
            resume_step=setup.resume_step,
        )

    def stored_id(self, tracker: str) -> str | None:
        """Id of this run at a tracker, where one was stored; None in a run that starts."""
        if not self.resume_step or self.is_upload:
            return None
        try:
            run_id = read_json(self.folder / IDS_FILE)[tracker]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return run_id if isinstance(run_id, str) else None

    def store_id(self, tracker: str, run_id: str) -> None:
        """Store the id of this run at a tracker, for a resume."""
        if self.is_upload:
            return
        path = self.folder / IDS_FILE
        try:
            ids = read_json(path)
        except (OSError, ValueError):
            ids = {}
        replace_text(path, json.dumps({**(ids if isinstance(ids, dict) else {}), tracker: run_id}) + "\n")

    def samples(self, step: int, split: str) -> list[list[Any]]:
        """First MAX_SAMPLES samples of a step, as rows of COLUMNS; none where they were not recorded."""
        store = SampleStore(self.folder / SAMPLES)
        try:
            rows = store.read(step, split=split)[:MAX_SAMPLES]
        except RunError:
            return []
        return [[_cell(row[name]) for name in COLUMNS] for row in rows]

    def curve(self) -> Path | None:
        """Draw rewards and pass rates into a picture in `logs/`; None where there are no points."""
        series = run_series(read_metrics(self.folder / METRICS_FILE))
        if not any(line.points() for line in series):
            return None
        return save_curve(self.folder / "logs" / "curve.png", series, title=self.name)

    def flat_config(self) -> dict[str, str]:
        """Settings by their full keys, with values as JSON."""
        return dict(_flat(self.config))


def is_validation(metrics: Mapping[str, float]) -> bool:
    """True if a step ended with a validation."""
    return any(name.startswith(("val-core/", "val-aux/", "val/")) for name in metrics)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics without NaN and infinities, which not every tracker takes."""
    return {name: value for name, value in metrics.items() if abs(as_number(value)) < float("inf")}


def in_folder(folder: Path, variable: str) -> str:
    """Folder that an environment variable names, else the given one."""
    return os.environ.get(variable) or str(folder)


def _cell(value: object) -> Any:
    if isinstance(value, str):
        return value[:_MAX_CHARS]
    return value if value is None or isinstance(value, (int, float)) else json.dumps(value)[:_MAX_CHARS]


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            pairs += _flat(value, f"{prefix}{name}.")
        else:
            pairs.append((f"{prefix}{name}", json.dumps(value)))
    return pairs
