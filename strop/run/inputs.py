"""What a run reads from outside its folder: digested when it begins, compared whenever something goes on from it.

A file is known again by its size and time; where these differ, by its content. Of large files, and of many, evenly
spaced pieces are read, so that a model of any size takes a moment: weights that were trained differ everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from strop.base.durable import replace_text
from strop.base.foreign_files import read_json
from strop.run.errors import RunError
from strop.run.paths import read_paths, split_path

INPUTS_FILE = "inputs.json"
MAX_BYTES = 1 << 28
"""What is read of one input, shared by its files."""
MIN_BYTES, PIECES = 1 << 16, 64
"""What is read of a file at least, and in how many pieces where that is not all of it."""
UNREADABLE = "cannot be read"
"""Digest of a file that this user may not read."""
MAX_FILES = 4096
"""Files of one folder that are looked at."""

Inputs = Mapping[str, Mapping[str, Any]]
"""By key (and place in a list): what the setting says, and size, time and digest of each file."""


def inputs_of(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The files and folders that settings name, as they are now.

    Args:
        settings: full key to value.
    """
    found = {}
    for name, given, path in _named(settings):
        files = dict(_files(path))
        facts = {at: _facts(file, count=len(files)) for at, file in files.items()}
        found[name] = {"given": given, "files": facts}
    return found


def write_inputs(run: Path, inputs: Inputs) -> None:
    """Keep them in the folder of a run."""
    replace_text(run / INPUTS_FILE, json.dumps({"format": 1, "inputs": inputs}, indent=1) + "\n")


def changes_since(run: Path, settings: Mapping[str, Any], *, only: tuple[str, ...] = ("",)) -> list[str]:
    """A clause for each input of a run that is not what it was when the run began.

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
        known: Inputs = read_json(file)["inputs"]
        found = []
        for name, given, path in _named(settings):
            if name not in known or known[name]["given"] != given or not name.startswith(only):
                continue
            found += [f"{name}={given}: {what}" for what in _differences(path, known[name]["files"])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(
            f"{file} is damaged ({type(error).__name__}: {error}); without it, what the run reads is not compared"
        ) from error
    return found


def kept_inputs(run: Path, settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The inputs as they are now, and as they were those that are not there: what comes in their place is compared.

    Args:
        run: its folder.
        settings: full key to value, as they are now.
    """
    file, texts = run / INPUTS_FILE, dict(read_paths(settings))
    before: Inputs = read_json(file)["inputs"] if file.is_file() else {}
    still = {name: one for name, one in before.items() if texts.get(name) == one["given"]}
    return {**still, **inputs_of(settings)}


def check_inputs(
    run: Path, settings: Mapping[str, Any], *, accept: bool, only: tuple[str, ...] = ("",)
) -> list[str]:
    """Lines about what has changed since a run began, where that is accepted; arguments as of `changes_since`.

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


def _named(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, Path]]:
    """Name, text and path of every setting that names something on this machine."""
    for name, text in read_paths(settings):
        if (found := split_path(text)) is not None:
            yield name, text, found[0]


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    """The files of an input, by their place in it; hidden ones and those of Python's cache say nothing."""
    if path.is_file():
        yield "", path
        return
    count = 0
    for file in sorted(path.rglob("*")):
        at = file.relative_to(path)
        if any(part.startswith(".") or part == "__pycache__" for part in at.parts) or not file.is_file():
            continue
        count += 1
        if count > MAX_FILES:
            return
        yield at.as_posix(), file


def _facts(file: Path, *, count: int) -> dict[str, Any]:
    """Size, time and digest; of a file that cannot be read, or is gone by now, that."""
    try:
        found = file.stat()
        digest = _digest(file, found.st_size, count=count)
        return {"size": found.st_size, "time": found.st_mtime_ns, "digest": digest}
    except OSError:
        return {"size": -1, "time": 0, "digest": UNREADABLE}


def _digest(file: Path, size: int, *, count: int) -> str:
    """Digest of a file that is one of so many of its input."""
    hasher = hashlib.sha256(str(size).encode())
    share = max(MIN_BYTES, MAX_BYTES // count)
    piece = share // PIECES
    with file.open("rb") as opened:
        if size <= share:
            hasher.update(opened.read())
            return hasher.hexdigest()
        for number in range(PIECES):
            opened.seek((size - piece) * number // (PIECES - 1))
            hasher.update(opened.read(piece))
    return hasher.hexdigest()


def _differences(path: Path, before: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    now = dict(_files(path))
    for at, facts in before.items():
        where = f"{at} " if at else ""
        if at not in now:
            yield f"{where}is gone"
            continue
        with contextlib.suppress(OSError):
            found = now[at].stat()
            if (found.st_size, found.st_mtime_ns) == (facts["size"], facts["time"]):
                continue
        if _facts(now[at], count=len(before))["digest"] != facts["digest"]:
            yield f"{where}has another content"
    for at in sorted(now.keys() - before.keys()):
        yield f"{at} is new"
