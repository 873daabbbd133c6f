"""Files of one input of a run, and the facts by which each is recognized.

A file is recognized by its size and time; where these differ, by its content. Of large files, and of many, evenly
spaced pieces are read, so that a model of any size takes a moment: weights that were trained differ everywhere.
"""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from strop.run.paths import split_path

MAX_BYTES = 1 << 28
"""Bytes to read of one input, shared by its files."""
MIN_BYTES, PIECES = 1 << 16, 64
"""Least number of bytes to read of a file, and the number of pieces where that is not all of it."""
MAX_FILES = 4096
"""Of a folder with more files, names and sizes are compared, not contents."""
UNREADABLE = "cannot be read"
"""Digest of a file that this user may not read."""
LISTING = "the list of its files"

Facts = Mapping[str, Any]
"""Size, time, digest, and the largest number of bytes that the digest covers."""


def facts_of(path: Path, before: Mapping[str, Facts] | None = None) -> dict[str, Facts]:
    """Facts of the files of an input, by their place in it.

    Args:
        path: a file or a folder.
        before: earlier facts, which hold for files of the same size and time.
    """
    files = files_of(path)
    if len(files) > MAX_FILES:
        return {LISTING: _facts_of_listing(files)}
    share, before = _bytes_per_file(len(files)), before or {}
    return {
        at: before[at] if "read" in before.get(at, {}) and _is_same(file, before[at]) else _facts(file, share)
        for at, file in files.items()
    }


def differences(path: Path, before: Mapping[str, Facts]) -> Iterator[str]:
    """A clause for each file of an input that has changed.

    Facts of the first form do not say how much of a file was read, and know nothing of what a file takes in.
    """
    now = files_of(path)
    if LISTING in before or len(now) > MAX_FILES:
        if before.get(LISTING, {}).get("digest") != _facts_of_listing(now)["digest"]:
            yield f"other files, or of other sizes ({len(now)} now)"
        return
    is_first = any("read" not in facts for facts in before.values())
    for at, facts in before.items():
        share = facts.get("read", _bytes_per_file(len(before)))
        prefix = f"{at} " if at else ""
        if at not in now:
            yield f"{prefix}is gone"
        elif not _is_same(now[at], facts) and _facts(now[at], share)["digest"] != facts["digest"]:
            yield f"{prefix}has another content"
    if is_first and not path.is_dir():
        return
    for at in sorted(now.keys() - before.keys()):
        yield f"{at} is new"


def _bytes_per_file(num_files: int) -> int:
    """Bytes to read of each of so many files."""
    return max(MIN_BYTES, MAX_BYTES // max(1, num_files))


def files_of(path: Path) -> dict[str, Path]:
    """The files of an input, by their place in it.

    Of a folder those in it, behind links too; hidden ones and those of Python's cache say nothing. Of a file itself,
    the modules beside it that it imports, and the files that a YAML file names.
    """
    if not path.is_file():
        return dict(_in_folder(path))
    files, waiting = {"": path}, [path]
    while waiting:
        for file in _referenced_files(waiting.pop()):
            at = os.path.relpath(file, path.parent)
            if at not in files and file != path:
                files[at] = file
                waiting.append(file)
    return files


def _in_folder(folder: Path) -> Iterator[tuple[str, Path]]:
    seen = set()
    for directory, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(directory)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name != "__pycache__" and real not in seen
        )
        if real in seen:
            continue  # a link that leads to a folder above it
        seen.add(real)
        for name in sorted(names):
            file = Path(directory, name)
            if not name.startswith(".") and file.is_file():
                yield file.relative_to(folder).as_posix(), file


def _referenced_files(file: Path) -> Iterator[Path]:
    """Files of the user that a Python or YAML file takes in; none of one that cannot be read as such."""
    try:
        if file.suffix == ".py":
            yield from _imported_modules(ast.parse(file.read_bytes()), file.parent)
        elif file.suffix in (".yaml", ".yml"):
            yield from _in_yaml(yaml.safe_load(file.read_text(encoding="utf-8")), file.parent)
    except (OSError, SyntaxError, ValueError, yaml.YAMLError, RecursionError):
        return  # whoever loads it says what is wrong


def _imported_modules(tree: ast.Module, folder: Path) -> Iterator[Path]:
    """Modules in the same folder that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            yield from _module(name, folder)


def _module(name: str, folder: Path) -> Iterator[Path]:
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        at = folder.joinpath(*parts[:count])
        yield from (file for file in (at.with_suffix(".py"), at / "__init__.py") if file.is_file())


def _in_yaml(value: object, folder: Path) -> Iterator[Path]:
    """Files that texts of a YAML file name: from its folder, or from the current directory; modules beside it."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from _in_yaml(entry, folder)
    elif isinstance(value, str) and ("/" in value or "." in value):
        parts = split_path(str(folder / value)) or split_path(value)
        if parts is not None and parts[0].is_file():
            yield parts[0]
        elif value.replace(".", "").isidentifier():
            yield from _module(value, folder)


def _is_same(file: Path, facts: Facts) -> bool:
    """True where size and time are unchanged."""
    try:
        status = file.stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (facts["size"], facts["time"])


def _facts(file: Path, share: int) -> Facts:
    """Facts of a file; of one that cannot be read, or is gone by now, that."""
    try:
        status = file.stat()
        digest = _digest(file, status.st_size, share)
        return {"size": status.st_size, "time": status.st_mtime_ns, "read": share, "digest": digest}
    except OSError:
        return {"size": -1, "time": 0, "read": share, "digest": UNREADABLE}


def _facts_of_listing(files: Mapping[str, Path]) -> Facts:
    hasher = hashlib.sha256()
    for at, file in files.items():
        try:
            size = file.stat().st_size
        except OSError:
            size = -1
        hasher.update(f"{at}\0{size}\0".encode())
    return {"size": len(files), "time": 0, "read": 0, "digest": hasher.hexdigest()}


def _digest(file: Path, size: int, share: int) -> str:
    """Digest of a file, of which so many bytes are read."""
    hasher = hashlib.sha256(str(size).encode())
    piece = share // PIECES
    with file.open("rb") as opened:
        if size <= share:
            hasher.update(opened.read())
            return hasher.hexdigest()
        for number in range(PIECES):
            opened.seek((size - piece) * number // (PIECES - 1))
            hasher.update(opened.read(piece))
    return hasher.hexdigest()
