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
"""Of a table of samples."""
MAX_SAMPLES = 32
"""Of a validation, and of the training step with it."""
_MAX_CHARS = 4000


@dataclass(frozen=True, kw_only=True)
class Story:
    """One run, as it presents itself."""

    folder: Path
    id: str
    project: str
    name: str
    config: Mapping[str, Any]
    resume_step: int = 0
    is_retold: bool = False
    """It is told once more, as another one: ids of trackers are neither looked up nor kept."""

    @staticmethod
    def of(setup: TrackerSetup, *, is_retold: bool = False) -> Story:
        """Of the run folder that the set-up names."""
        info = read_json(setup.folder / RUN_FILE)
        return Story(
            folder=setup.folder,
            id=f"{info['id']}-{int(time.time())}" if is_retold else str(info["id"]),
            is_retold=is_retold,
            project=setup.project,
            name=setup.name or setup.folder.resolve().name,
            config=info.get("config", {}),
            resume_step=setup.resume_step,
        )

    def known_id(self, tracker: str) -> str | None:
        """The id under which a tracker knows this run, where it told one; None in a run that starts."""
        if not self.resume_step or self.is_retold:
            return None
        try:
            run_id = read_json(self.folder / IDS_FILE)[tracker]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return run_id if isinstance(run_id, str) else None

    def remember_id(self, tracker: str, value: str) -> None:
        """Keep it for a resume."""
        if self.is_retold:
            return
        path = self.folder / IDS_FILE
        try:
            ids = read_json(path)
        except (OSError, ValueError):
            ids = {}
        replace_text(path, json.dumps({**(ids if isinstance(ids, dict) else {}), tracker: value}) + "\n")

    def samples(self, step: int, split: str) -> list[list[Any]]:
        """Rows of COLUMNS of the first samples of a step; none where they were not kept."""
        store = SampleStore(self.folder / SAMPLES)
        try:
            rows = store.read(step, split=split)[:MAX_SAMPLES]
        except RunError:
            return []
        return [[_cell(row[name]) for name in COLUMNS] for row in rows]

    def curve(self) -> Path | None:
        """A picture of rewards and pass rates, beside the metrics; None where there is nothing to draw."""
        series = run_series(read_metrics(self.folder / METRICS_FILE))
        if not any(line.points() for line in series):
            return None
        return save_curve(self.folder / "logs" / "curve.png", series, title=self.name)

    def flat_config(self) -> dict[str, str]:
        """Full keys and values as texts."""
        return dict(_flat(self.config))


def is_validation(metrics: Mapping[str, float]) -> bool:
    """True if a step ended with a validation."""
    return any(name.startswith(("val-core/", "val-aux/", "val/")) for name in metrics)


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Numbers that every tracker takes."""
    return {name: value for name, value in metrics.items() if abs(as_number(value)) < float("inf")}


def in_folder(folder: Path, variable: str) -> str:
    """The folder of an environment variable, else one below the run's."""
    return os.environ.get(variable) or str(folder)


def _cell(value: Any) -> Any:
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
