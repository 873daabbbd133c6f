"""What each listening socket of a process is for, written down where `strop doctor RUN --sockets` finds it.

The system's tables say that a process listens, not why. A process that opens a socket therefore notes its inode, which
no other socket has while it is open. A note is a hint for a person: what is not noted counts as unprotected.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from strop.cli.doctor.listing import listeners

SUFFIX = ".sockets"
"""Of the file with the notes, beside the log of the process."""
RAY = "calls of Ray"
"""Purpose of the sockets that Ray opens in a process of ours."""

_MAX_BYTES = 1 << 20
"""Of the notes of one process."""

_file: Path | None = None


def keep_in(file: Path) -> None:
    """From now on this process notes its sockets here."""
    global _file
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("", encoding="utf-8")
    _file = file


def write_all_as_rays() -> None:
    """Note what this process listens on so far: in a worker process of Ray, that is Ray's."""
    for one in listeners([os.getpid()]):
        write_inode(one.inode, RAY, is_authenticated=False)


@contextmanager
def opening_rays() -> Iterator[None]:
    """What is opened meanwhile is Ray's."""
    before = {one.inode for one in listeners([os.getpid()])}
    yield
    for one in listeners([os.getpid()]):
        if one.inode not in before:
            write_inode(one.inode, RAY, is_authenticated=False)


def read(file: Path) -> dict[int, tuple[str, bool]]:
    """The notes of a process by inode: purpose, and whether it authenticates; empty where there are none."""
    found: dict[int, tuple[str, bool]] = {}
    for line in read_small(file).splitlines():
        try:
            note = json.loads(line)
            found[int(note["inode"])] = (str(note["purpose"]), note["authenticated"] is True)
        except (ValueError, KeyError, TypeError, RecursionError):  # cut off, or no note
            continue
    return found


def read_small(file: Path) -> str:
    """The beginning of a text that anybody may have written; "" where there is none, or something else than a file."""
    try:
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
            return stream.read(_MAX_BYTES).decode(errors="replace") if is_file else ""
    except OSError:
        return ""


def write(listener: socket.socket, purpose: str, *, is_authenticated: bool) -> None:
    """Note what a socket is for; nothing where this process keeps no notes."""
    write_inode(os.fstat(listener.fileno()).st_ino, purpose, is_authenticated=is_authenticated)


def write_inode(inode: int, purpose: str, *, is_authenticated: bool) -> None:
    """The same for a socket that somebody else in this process has opened."""
    if _file is not None:
        note = {"inode": inode, "purpose": purpose, "authenticated": is_authenticated}
        with _file.open("a", encoding="utf-8") as notes:
            notes.write(json.dumps(note) + "\n")
