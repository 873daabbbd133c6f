"""Inputs of a run from outside its folder: digested when it begins, compared whenever something goes on from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from strop.run.errors import RunError
from strop.run.input_files import differences, facts_of
from strop.run.paths import read_paths, split_path
from strop.utils.atomic_io import replace_text
from strop.utils.safe_read import read_json

INPUTS_FILE = "inputs.json"

Inputs = Mapping[str, Mapping[str, Any]]
"""By key (and place in a list): text of the setting, and facts of each file."""


def inputs_of(settings: Mapping[str, Any], *, earlier: Inputs | None = None) -> dict[str, dict[str, Any]]:
    """The files and folders that settings name, as they are now.

    Args:
        settings: full key to value.
        earlier: the inputs of before; what has not been written since is not read again.
    """
    inputs = {}
    for name, text, path in _input_settings(settings):
        before = (earlier or {}).get(name, {})
        files = facts_of(path, before["files"] if before.get("given") == text else None)
        inputs[name] = {"given": text, "files": files}
    return inputs


def write_inputs(run: Path, inputs: Inputs) -> None:
    """Keep them in the folder of a run."""
    replace_text(run / INPUTS_FILE, json.dumps({"format": 1, "inputs": inputs}, indent=1) + "\n")


def changes_since(run: Path, settings: Mapping[str, Any], *, only: tuple[str, ...] = ("",)) -> list[str]:
    """A clause for each input of a run that has changed since the run began.

    Args:
        run: its folder; one of a version that kept no inputs has not changed.
        settings: full key to value, as they are now. What names something else now is meant to; what names nothing that
            is there is for others to say.
        only: beginnings of the keys that matter.
    """
    file = run / INPUTS_FILE
    if not file.is_file():
        return []
    try:
        inputs: Inputs = read_json(file)["inputs"]
        changes = []
        for name, text, path in _input_settings(settings):
            if name not in inputs or inputs[name]["given"] != text or not name.startswith(only):
                continue
            changes += [f"{name}={text}: {clause}" for clause in differences(path, inputs[name]["files"])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{file} is damaged ({type(error).__name__}: {error}); without it, what the run reads is not compared"
        ) from error
    return changes


def merged_inputs(run: Path, settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The inputs as they are now, and of missing ones the earlier facts, with which a replacement is compared.

    Args:
        run: its folder.
        settings: full key to value, as they are now.
    """
    file, texts = run / INPUTS_FILE, dict(read_paths(settings))
    before: Inputs = read_json(file)["inputs"] if file.is_file() else {}
    still = {name: entry for name, entry in before.items() if texts.get(name) == entry["given"]}
    return {**still, **inputs_of(settings, earlier=before)}


def check_inputs(
    run: Path, settings: Mapping[str, Any], *, accept: bool, only: tuple[str, ...] = ("",)
) -> list[str]:
    """Lines on the inputs that changed since a run began, where that is accepted; arguments as of `changes_since`.

    Raises:
        RunError: something has changed, and it is not.
    """
    changed = changes_since(run, settings, only=only)
    if changed and not accept:
        raise RunError(
            f"{run} does not read what it began with: {'; '.join(changed)}. Put it back, or go on with what is there: "
            f"--accept-changes"
        )
    return [f"changed since the run began: {change}" for change in changed]


def _input_settings(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, Path]]:
    """Name, text and path of every setting that names something on this machine."""
    for name, text in read_paths(settings):
        if (parts := split_path(text)) is not None:
            yield name, text, parts[0]
