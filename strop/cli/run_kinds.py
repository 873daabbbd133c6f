"""Kinds of runs, by the command that makes them."""

from __future__ import annotations

from pathlib import Path

from strop.run import RunFolder, is_run
from strop.trainer.sections import SECTION_OF_COMMAND
from strop.utils.terminal import UsageError


def check_kind(folder: Path, kind: str, *, needs_same: bool = True) -> None:
    """Refuse a run that another command has made, where that matters."""
    if not is_run(folder) or not needs_same:
        return  # opening it says what is wrong
    with RunFolder.open(folder, read_only=True) as run:
        made_by = run.made_by
    if _kind_of(made_by) not in ("", kind):
        raise UsageError(f"{folder} is a run of `strop {made_by}`; continue it with that command")


def _kind_of(word: str) -> str:
    """The kind of run that a command makes; empty where it makes none."""
    return "train" if word == "train" else SECTION_OF_COMMAND.get(word, "")
