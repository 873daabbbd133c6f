"""Writes that survive a crash: a file appears whole under its name, a line whole in its file, or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

from strop.utils.safe_read import lines_of, open_regular

_NO_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}
"""Error numbers with which some network file systems answer an fsync of a folder."""


def fsync_path(path: Path) -> None:
    """Return once the content of a file, or the names in a folder, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Return once the names in a folder have reached the disk, where its file system knows of that.

    Raises:
        OSError: the disk refused.
    """
    try:
        fsync_path(folder)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


def write_durable(path: Path, text: str) -> None:
    """Write a new file in the place of what has the name, and wait for the disk."""
    path.unlink(missing_ok=True)  # a link of that name would lead what is written elsewhere
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Give `path` this content in one step: a reader sees the old text or the whole of the text given.

    Raises:
        OSError: the disk refused; the old content is still there.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_durable(temporary, text)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):  # the first error is the one to tell
            temporary.unlink()
        raise
    sync_folder(path.parent)


def share_as_usual(*paths: Path) -> None:
    """Give files the mode of one that a program makes in their folder, by the umask: safetensors leaves them to their
    owner alone (0600), and others could not read a model on a shared disk. Modes stay on a disk that has none."""
    for path in paths:
        example = path.with_name(f".{path.name}.mode")
        with suppress(OSError):
            try:
                with example.open("xb") as file:
                    mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            finally:
                example.unlink(missing_ok=True)
            path.chmod(mode)


def append_line(file: FileIO, line: bytes) -> None:
    """Add a line to a file that one process writes and any number read; it is in the file when this returns.

    Args:
        file: open for appending, without a buffer: nothing waits in memory for a disk that is full.
        line: with its newline.

    Raises:
        OSError: the disk refused; the file ends with the line before.
    """
    size = os.fstat(file.fileno()).st_size
    try:
        while line:  # a disk that fills up within the line writes a part, then gives the error
            line = line[file.write(line) :]
    except OSError:
        with suppress(OSError):  # the first error is the one to tell
            file.truncate(size)
        raise


def whole_lines(path: Path) -> Iterator[bytes]:
    """The lines of such a file, without the rest of a write that was interrupted.

    Raises:
        OSError: it cannot be read, or is no file.
    """
    with open_regular(path) as file:
        for line in lines_of(file, path):
            if line.endswith(b"\n"):
                yield line


def sha256_of_file(path: Path) -> str:
    """Hex digest of a file, read in chunks: memory does not grow with the file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
