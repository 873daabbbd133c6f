"""Checkpoints of a run as models: RUN@STEP, RUN@best and RUN@all, with the cost of their training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.evaluation.models import ModelSource, find_model
from strop.run import MODEL_FOLDER, RunError, RunFolder, is_run
from strop.run.manifest import MANIFEST, read_manifest
from strop.run.naming import run_in
from strop.utils.terminal import UsageError, say

if TYPE_CHECKING:
    from strop.evaluation.cost import TrainingCost

WORDS = "RUN@STEP, RUN@best or RUN@all (its start and every checkpoint)"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One model that is measured."""

    name: str
    source: ModelSource
    run: Path | None = None
    """The run that it is a checkpoint of; None for other models."""
    step: int | None = None
    """Of that run; 0 is the model that it began with."""
    spent: TrainingCost | None = None
    """Cost of the training up to that step; None where the records of the run do not say."""


def has_step(word: str) -> bool:
    """True for RUN@STEP, RUN@best and RUN@all."""
    return _split(word)[1] != ""


def points_of(word: str) -> list[Point]:
    """The models of a word of the command line; prints their remarks.

    Raises:
        ValueError, UsageError, RunError: as `find_model`; or the run has no such checkpoint.
    """
    folder, step = _split(word)
    if not step:
        return [_of_model(word, None)]
    run = run_in(folder)
    if step != "all":
        return [_of_model(str(run), "best" if step == "best" else int(step))]
    with RunFolder.open(run, read_only=True) as opened:
        steps = opened.checkpoints.steps()
        exported_steps = [
            step_of_run
            for step_of_run in steps
            if (opened.checkpoints.at(step_of_run).path / MODEL_FOLDER).is_dir()
        ]
    if len(exported_steps) < len(steps):
        missing = ", ".join(str(step_of_run) for step_of_run in steps if step_of_run not in exported_steps)
        say(f"{run}: without checkpoint {missing}, which has no model folder (run.hf_model)")
    if not exported_steps:
        raise RunError(f"{run} has no checkpoint with a model folder (run.hf_model) yet")
    return [*_start_of(run), *(_of_model(str(run), step_of_run) for step_of_run in exported_steps)]


def _split(word: str) -> tuple[Path, str]:
    """Folder and step; no step for a word of another form. A folder whose name has an @ in it is one."""
    folder, at, step = word.rpartition("@")
    path = Path(folder).expanduser()
    if not at or Path(word).expanduser().is_dir() or not path.is_dir():
        return Path(word), ""
    if step not in ("best", "all") and not step.isdecimal():
        raise UsageError(f"{word}: {step!r} is no step; give {WORDS}, or RUN alone")
    return path, step


def _of_model(word: str, step: int | str | None) -> Point:
    source = find_model(word, step=step)
    for line in source.lines:
        say(line)
    checkpoint = source.folder.resolve().parent
    run = checkpoint.parent.parent
    if not is_run(run) or not (checkpoint / MANIFEST).is_file():
        return Point(name=word, source=source)
    step_of_checkpoint = read_manifest(checkpoint).step
    name = word if is_run(Path(word)) else str(run)
    return Point(
        name=f"{name}@{step_of_checkpoint}",
        source=source,
        run=run,
        step=step_of_checkpoint,
        spent=_spent(run, step_of_checkpoint),
    )


def _start_of(run: Path) -> list[Point]:
    """The model that a run began with, where it is still there."""
    with RunFolder.open(run, read_only=True) as opened:
        model = opened.info["config"].get("model")
    path = model.get("path") if isinstance(model, dict) else None
    if not isinstance(path, str) or not (Path(path) / "config.json").is_file():
        say(f"{run}: without its start, since its model.path, {path!r}, is no folder here")
        return []
    source = ModelSource(folder=Path(path), config=None)
    return [Point(name=f"{run}@0", source=source, run=run.resolve(), step=0, spent=_spent(run, 0))]


def _spent(run: Path, step: int) -> TrainingCost | None:
    from strop.evaluation.cost import training_cost

    with RunFolder.open(run, read_only=True) as opened:
        return training_cost(opened, step)
