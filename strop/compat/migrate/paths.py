"""Relative paths of a script that changes the folder with `cd`, rewritten to start where the script was started."""

from __future__ import annotations

import dataclasses
import posixpath
from pathlib import Path
from typing import Any

from strop.compat.migrate.result import Outcome
from strop.compat.migrate.shell_words import Word
from strop.compat.migrate.tables import Migration, Row

_DATA = tuple(f"{at}data.{files}_files" for at in ("", "sft.", "prefer.") for files in ("train", "val"))
_FILES = (
    *_DATA, "data.dataset_class.path", "data.datagen.path", "reward.path", "reward.functions", "agent.tools",
    "agent.function_tools", "agent.interactions", "agent.loops", "agent.files", "algorithm.extensions",
)  # fmt: skip
"""Our keys that name files and folders."""
_MODELS = (
    "model.path", "model.tokenizer_path", "model.chat_template", "model.lora.path", "critic.path", "reference.path",
    "reward_model.path", "teacher.path", "prm.path",
)  # fmt: skip
"""Our keys that name folders, or something else: a model of a hub, the text of a template."""


def moved(migration: Migration, folder: Word | None, name: str) -> Migration:
    """The migration with relative paths as they are where the script was started, and a row that says so.

    Args:
        migration: of a script.
        folder: that it changes to before the training; None: it does not.
        name: of the script's file.
    """
    if folder is None or folder.text == ".":
        return migration
    is_known = not folder.unresolved
    rows, paths = [], []
    for row in migration.rows:
        ours = {key: _rebased(key, value, folder.text) for key, value in row.outcome.ours.items()}
        changed = [key for key, value in ours.items() if value != row.outcome.ours[key]]
        paths += changed
        outcome = dataclasses.replace(row.outcome, ours=ours) if changed and is_known else row.outcome
        rows.append(dataclasses.replace(row, outcome=outcome))
    folder_row = Row(
        key="cd",
        value=folder.text,
        outcome=_folder_outcome(folder, paths),
        place=f"{name}, line {folder.line}",
    )
    return dataclasses.replace(migration, rows=(*rows, folder_row))


def _folder_outcome(folder: Word, paths: list[str]) -> Outcome:
    if not paths:
        return Outcome(status="not needed", note="no path of the settings is relative")
    listed = ", ".join(dict.fromkeys(paths))
    if not folder.unresolved:
        return Outcome(status="translated", note=f"{listed} start there, and are written from here")
    give = " ".join(f"--set {name}=FOLDER" for name in dict.fromkeys(folder.variables))
    way_out = f"say {give}" if give else "write the folder itself into the script"
    return Outcome(
        status="unresolved", note=f"{listed} start there, and nothing says where that is: {way_out}"
    )


def _rebased(key: str, value: object, folder: str) -> Any:
    if key not in (*_FILES, *_MODELS):
        return value
    if isinstance(value, list):
        return [_rebased(key, entry, folder) for entry in value]
    if isinstance(value, dict):
        return {
            name: _rebased(key, entry, folder) if name == "path" else entry for name, entry in value.items()
        }
    if not isinstance(value, str) or not _is_relative(value):
        return value
    path = posixpath.normpath(posixpath.join(folder, value))
    is_path = key in _FILES or value.startswith(".") or Path(path).exists()
    return path if is_path else value


def _is_relative(text: str) -> bool:
    """Neither absolute nor an address, nor something that a shell would make of it."""
    return bool(text) and not text.startswith(("/", "~", "hub:", "modelscope:", "$")) and "://" not in text
