"""MODEL_OR_RUN: the model folder and settings of a word of the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.run import CheckpointError, is_run
from strop.run.folder import CONFIG_FILE
from strop.run.manifest import MANIFEST, check_files, read_manifest
from strop.run.naming import model_folder, run_in, saved_checkpoint
from strop.utils.shell_words import shell_word
from strop.utils.terminal import say

if TYPE_CHECKING:
    from strop.trainer.config import Config

HELP = (
    "a run folder (its last valid checkpoint), a checkpoint folder, any Hugging Face model folder, or where a model is "
    "fetched from: ORG/NAME[@REVISION] of the Hugging Face hub, modelscope:ORG/NAME, a URL"
)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model on disk."""

    folder: Path
    """The Hugging Face folder."""
    config: Path | None
    """Settings of the run it comes from; None for a model that no run made."""
    lines: tuple[str, ...] = ()
    """Remarks for the user."""


def model_name(config: Config) -> str:
    """Name of the model that answers: a folder, or a model on a server."""
    return config.rollout.remote.model if config.rollout.remote else config.model.path


def find_model(text: str, *, step: int | str | None = None, weights: bool = True) -> ModelSource:
    """The model that a word of the command line stands for.

    Args:
        text: the word.
        step: of a checkpoint of a run, or best; None takes the last valid one.
        weights: fetch weights too, where it is fetched.

    Raises:
        ValueError: it is no model, it cannot be fetched, or `step` is given for something else than a run.
        UsageError: it is a folder of several runs.
        RunError: the run has no such checkpoint, or the checkpoint is damaged.
    """
    path = Path(text).expanduser()
    if not path.is_dir() and _is_elsewhere(text):
        return _of_hub(text, step, weights=weights)
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        if path.exists() and path.suffix in (".yaml", ".yml"):
            raise ValueError(
                f"{text} is a file of settings: say --config {shell_word(text)}; its model.path is then the model"
            )
        if "=" in text:
            problem = "is no folder (the model comes first, then key=value)"
        raise ValueError(f"{text} {problem}; give {HELP}")
    if not any((path / name).is_file() for name in (MANIFEST, "config.json")):
        path = run_in(path)
    if is_run(path):
        return _of_run(path, step)
    if step is not None:
        raise ValueError(f"--step {step} chooses a checkpoint of a run, and {text} is none: leave it out")
    if (path / MANIFEST).is_file():
        return _of_checkpoint(path)
    if not (path / "config.json").is_file():
        entries = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) or "nothing"
        raise ValueError(f"{text} holds no model (found: {entries}); give {HELP}")
    checkpoint = path.resolve().parent
    config = _run_config(checkpoint) if (checkpoint / MANIFEST).is_file() else None
    return ModelSource(folder=path, config=config)


def _is_elsewhere(text: str) -> bool:
    """A word that is no folder names a model of a hub or a URL; key=value does not."""
    if "=" in text and "://" not in text:
        return False
    from strop.trainer.model_locations import is_model_elsewhere

    try:
        return is_model_elsewhere(text, "MODEL")
    except ValueError:
        if text.startswith(("hub:", "hf:", "modelscope:", "http")):
            raise
        return False


def _of_hub(text: str, step: int | str | None, *, weights: bool) -> ModelSource:
    if step is not None:
        raise ValueError(f"--step {step} chooses a checkpoint of a run, and {text} is none: leave it out")
    from strop.utils.hub import models  # libraries of hubs: slow to import

    fetched = models.fetch_model(text, models.Fetch(say=say, weights=weights), key="MODEL")
    return ModelSource(
        folder=Path(fetched.folder),
        config=None,
        lines=(f"model: {fetched.address}, revision {fetched.revision}",),
    )


def _of_run(path: Path, step: int | str | None) -> ModelSource:
    checkpoint, lines = saved_checkpoint(path, step)
    remarks = (*lines, f"model: checkpoint {checkpoint.step} of {path}")
    config = _run_config(checkpoint.path)
    if config is None:
        remarks = (
            *remarks,
            f"{path} has lost its {CONFIG_FILE}, so all settings are the defaults (--config names others)",
        )
    return ModelSource(folder=model_folder(checkpoint.path), config=config, lines=remarks)


def _of_checkpoint(path: Path) -> ModelSource:
    try:
        check_files(path, read_manifest(path), hashes=True)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {path} {error}; give another one, or the run folder") from error
    return ModelSource(folder=model_folder(path), config=_run_config(path))


def _run_config(checkpoint: Path) -> Path | None:
    """Settings of the run that a checkpoint lies in; None when it was taken out of its run."""
    run = checkpoint.resolve().parent.parent
    config = run / CONFIG_FILE
    return config if is_run(run) and os.path.lexists(config) else None
