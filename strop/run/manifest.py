"""The manifest of a checkpoint: names, sizes and hashes of its files, and the facts of a continuation.

It is written last, after all files have reached the disk: a folder without a manifest is the rest of a
save that did not end.
"""

from __future__ import annotations

import hashlib
import json
import math
import numbers
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from strop.run.errors import RunError
from strop.run.records import MAX_STEP
from strop.utils.atomic_io import fsync_path, sha256_of_file, sync_folder, write_durable
from strop.utils.safe_read import check_regular, parse_json, read_text

MANIFEST = "manifest.json"
_HASHING_THREADS = min(4, os.cpu_count() or 1)  # hashing a shard keeps one core busy; shards are many
FORMAT = 1
"""Raised when an older strop could not read what this one writes."""


class CheckpointError(RunError):
    """A checkpoint cannot be saved or used; the message says which one stays valid and what to do."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Files and facts of a checkpoint."""

    step: int
    score: float | None
    """Validation score that ranks it among the best; None when it was not validated."""
    created: str
    """UTC time in ISO format."""
    facts: Mapping[str, Any]
    """State that is no tensor: ledger, schedules, random streams, metrics step."""
    files: Mapping[str, FileEntry]
    """Entry per file, by its path inside the checkpoint."""

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.num_bytes for entry in self.files.values())


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were compared with its manifest."""

    step: int
    path: Path
    manifest: Manifest


def seal(folder: Path, *, step: int, score: float | None, facts: Mapping[str, Any]) -> Manifest:
    """Bring every file of the folder to the disk, then write and return its manifest.

    Raises:
        ValueError: the folder holds no file, or something that is neither file nor folder.
        OSError: the disk refused.
    """
    paths: list[Path] = []
    folders = [folder]
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is a link or a special file; a checkpoint holds its own bytes: copy it")
        (folders if path.is_dir() else paths).append(path)
    if not paths:
        raise ValueError(f"the checkpoint of step {step} has no file: `write` puts its files into {folder}")
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        entries = list(pool.map(_entry_on_disk, paths))
    files = {path.relative_to(folder).as_posix(): entry for path, entry in zip(paths, entries, strict=True)}
    for subfolder in reversed(folders):
        sync_folder(subfolder)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = Manifest(step=step, score=score, created=created, facts=facts, files=files)
    write_durable(folder / MANIFEST, _to_text(manifest))
    sync_folder(folder)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, checked against its own hash.

    Raises:
        CheckpointError: it is missing, damaged, or of a later format; the message begins lower-case, to
            follow the name of the checkpoint.
    """
    try:
        text = read_text(folder / MANIFEST)
    except FileNotFoundError:
        raise CheckpointError("has no manifest (crash during save)") from None
    except OSError as error:
        raise CheckpointError(f"has a manifest that cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"has a manifest that cannot be read ({error})") from error
    try:
        document = parse_json(text)
        body = document["manifest"]
        stated = document["sha256"]
    except (ValueError, KeyError, TypeError):
        raise CheckpointError("has a damaged manifest (it is no complete JSON document)") from None
    if _hash(body) != stated:
        raise CheckpointError("has a damaged manifest (its content differs from its own hash)")
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        format_of_file = body.get("format") if isinstance(body, dict) else None
        raise CheckpointError(
            f"has format {format_of_file!s:.20}, this strop reads format {FORMAT}: use the strop that wrote it"
        )
    return _parse_manifest(body)


def _parse_manifest(body: Mapping[str, Any]) -> Manifest:
    """The manifest of a document whose hash is right, which anybody can compute."""
    step, score, facts, files = (body.get(name) for name in ("step", "score", "facts", "files"))
    if not (
        type(step) is int
        and 0 <= step < MAX_STEP
        and (score is None or (isinstance(score, (int, float)) and not isinstance(score, bool)))
        and isinstance(facts, dict)
        and isinstance(files, dict)
        and all(isinstance(entry, dict) for entry in files.values())
    ):
        raise CheckpointError("has a damaged manifest (its step, score, facts or files have another form)")
    entries = {}
    for name, entry in files.items():
        num_bytes, sha256 = entry.get("bytes"), entry.get("sha256")
        if type(num_bytes) is not int or not isinstance(sha256, str):
            raise CheckpointError(f"has a damaged manifest (no size and hash of {name!r:.80})")
        if not name.isprintable() or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"has a manifest that names {name!r:.80}, which is not in the checkpoint")
        entries[name] = FileEntry(num_bytes, sha256)
    return Manifest(step=step, score=score, created=str(body.get("created")), facts=facts, files=entries)


def check_files(folder: Path, manifest: Manifest, *, hashes: bool) -> None:
    """Compare the files of a checkpoint with its manifest.

    Args:
        hashes: also read every byte; False compares names and sizes, which costs nothing.

    Raises:
        CheckpointError: the first file that differs, and how.
    """
    root = folder.resolve()
    if not hashes:
        for name, entry in manifest.files.items():
            _check_file(root, name, entry, hashes=False)
        return
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        checks = pool.map(lambda file: _check_file(root, *file, hashes=True), manifest.files.items())
        list(checks)  # raises what the first of them raised


def _entry_on_disk(path: Path) -> FileEntry:
    fsync_path(path)
    return FileEntry(path.stat().st_size, sha256_of_file(path))


def _check_file(root: Path, name: str, entry: FileEntry, *, hashes: bool) -> None:
    """Check a file of the folder `root`, which lies behind no link."""
    path = root / name
    try:
        if _has_links(root, name) and not path.resolve().is_relative_to(root):
            raise CheckpointError(f"is damaged: {name} is a link that leads out of it")
        num_bytes = check_regular(path)
        if num_bytes != entry.num_bytes:
            raise CheckpointError(f"is damaged: {name} has {num_bytes} bytes, not {entry.num_bytes}")
        if hashes and sha256_of_file(path) != entry.sha256:
            raise CheckpointError(f"is damaged: {name} differs from its hash in the manifest")
    except FileNotFoundError:
        raise CheckpointError(f"is damaged: {name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {name}: {error.strerror}") from error


def _has_links(root: Path, name: str) -> bool:
    """A part of a name below a folder, as `_parse_manifest` admits it, is a link."""
    parts = PurePosixPath(name).parts
    return any(root.joinpath(*parts[: count + 1]).is_symlink() for count in range(len(parts)))


def _to_text(manifest: Manifest) -> str:
    body = {
        "format": FORMAT,
        "step": manifest.step,
        "score": manifest.score,
        "created": manifest.created,
        "files": {
            name: {"bytes": entry.num_bytes, "sha256": entry.sha256} for name, entry in manifest.files.items()
        },
        "facts": manifest.facts,
    }
    return json.dumps({"sha256": _hash(body), "manifest": body}, indent=1) + "\n"


def _hash(body: object) -> str:
    return hashlib.sha256(canonical_json(body)).hexdigest()


def jsonable(value: object, name: str) -> Any:
    """`value` as plain JSON types: tuples become lists, NumPy numbers become Python numbers.

    JSON has no NaN and no infinity, and many readers refuse the words Python writes for them, so these
    floats become the strings "nan", "inf" and "-inf".

    Args:
        value: numbers, strings, None, mappings with string keys and sequences of these.
        name: of the value, for the error.

    Raises:
        TypeError: a value or key of another type; the message holds the path to it.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r}, but JSON keys are strings")
        return {key: jsonable(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [jsonable(item, f"{name}[{position}]") for position, item in enumerate(value)]
    scalar = getattr(value, "tolist", None)  # NumPy arrays, and numpy.bool_, which is no number
    if callable(scalar):
        return jsonable(scalar(), name)
    raise TypeError(f"{name} is a {type(value).__name__}, which JSON cannot hold; convert it first")


def canonical_json(value: object) -> bytes:
    """One text per JSON value: sorted keys, no spaces. Hashes are taken over it."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")
