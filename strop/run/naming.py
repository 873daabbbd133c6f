"""RUN on a command line: the run that is meant, the checkpoint of it, and its model folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

from strop.run import Checkpoint, CheckpointError, RunError, RunFolder, is_run
from strop.utils.shell_words import shell_word
from strop.utils.terminal import UsageError, say


def choose_checkpoint(run: RunFolder, step: int | str | None) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint of a run that `--step` means, every byte of it verified, and a line on each one skipped.

    Raises:
        RunError: there is no checkpoint of that step, or none with a score.
        CheckpointError: it is damaged.
    """
    if step is None:
        return run.checkpoints.latest_valid()
    if step == "best":
        best = run.checkpoints.best()
        if best is None:
            raise RunError(
                f"{run.path} has no checkpoint with a validation (data.val_files, eval.every, run.save_every); give a "
                f"number: {', '.join(map(str, run.checkpoints.steps())) or 'it has no checkpoint'}"
            )
        step = best[0]
    try:
        return run.checkpoints.at(int(step)), []
    except CheckpointError as error:
        raise CheckpointError(f"no checkpoint of step {step} of {run.path}: {error}") from error


def run_in(folder: Path) -> Path:
    """The folder itself, or the run right inside it where that is the only one: quickstart's --out holds runs.

    Raises:
        UsageError: it is no run and holds several; the sentence names them.
    """
    if is_run(folder):
        return folder
    runs: list[Path] = []
    with contextlib.suppress(OSError):  # who opens it says why it cannot be read
        runs = sorted(entry for entry in folder.iterdir() if is_run(entry))
    if len(runs) > 1:
        raise UsageError(
            f"{folder} is no run, but holds {len(runs)}: name one, {' or '.join(map(str, runs))}"
        )
    if not runs:
        return folder
    say(f"the run in {folder}: {runs[0]}")
    return runs[0]


def saved_checkpoint(folder: Path, step: int | str | None = None) -> tuple[Checkpoint, list[str]]:
    """As `choose_checkpoint`, of a run that has one.

    Raises:
        RunError: the run has none; else as `choose_checkpoint`.
    """
    with RunFolder.open(folder, read_only=True) as run:
        checkpoint, lines = choose_checkpoint(run, step)
    if checkpoint is None:
        reasons = f": {'; '.join(lines)}" if lines else " yet"
        raise RunError(f"{folder} has no valid checkpoint{reasons}; name a model folder, or continue the run")
    return checkpoint, lines


def model_folder(checkpoint: Path) -> Path:
    """The Hugging Face folder of a checkpoint.

    Raises:
        ValueError: it has none.
    """
    folder = checkpoint / "model"
    if not folder.is_dir():
        run = checkpoint.resolve().parent.parent
        raise ValueError(
            f"{checkpoint} has no model folder (run.hf_model): write one with "
            f"`strop export {shell_word(run)} --out OUT`, and give OUT"
        )
    return folder
