"""Starting a run in a folder, or going on with the one that is there: the same call for both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from strop.base import trust
from strop.run import RunError, is_run
from strop.trainer.config import Config
from strop.trainer.launch import CONFIG_FILE, Say, Start, resume_run, start_run
from strop.trainer.loading import read


def start_or_resume(folder: Path, config: Config, *, command: Sequence[str], say: Say) -> Start:
    """Start in an absent folder, continue in one that holds a run of this very configuration.

    Raises:
        RunError: the folder holds a run of another configuration.
    """
    if not is_run(folder) or not (folder / CONFIG_FILE).is_file():
        if is_run(folder):  # it died between its first two files; nothing is lost with them
            (folder / "run.json").unlink()
        return start_run(folder, config, command=command, say=say)

    def refuse_others(text: str) -> None:
        with trust.door():  # to compare settings runs nothing of what they name
            trust.close(str(folder))
            is_same = read(folder / CONFIG_FILE, text=text) == config
        if not is_same:
            raise RunError(
                f"{folder} holds a run with other settings (see `strop config show --config {folder / CONFIG_FILE}`); "
                f"continue that one with --resume, or choose another folder with --out"
            )

    return resume_run(folder, say=say, admit=refuse_others)
