"""Slots in shared memory of the node, for a sender and receivers that are both there.

One file of the node's memory file system holds the slots (slots.py).

The file has a name only until all receivers have mapped it, so the memory is given back however the processes end.
For a process that was killed in that short time, the next sender removes the file: its owner holds a lock on it that
ends with the process.

Tensors of an accelerator go through host memory here; device_slots.py leaves them on the device.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from strop.rollout.weight_sync.slots import NUM_SLOTS
from strop.rollout.weight_sync.transport import Plan

FOLDER = Path("/dev/shm")
"""Folder in which Linux keeps files in memory."""
PREFIX = "strop-weights-"
PLAN_NAME = "shared_memory"
SLOT_BYTES = 16 << 20
"""Largest slot: a message and its answer, which a slot costs, take little beside its copy."""
_HEADER_BYTES = mmap.PAGESIZE
"""The slots start behind a page that tells this session's file from any other."""
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""The folder is everybody's: neither a link nor a pipe that somebody has put there is followed or waited for."""


class SharedFile:
    """The sender's file, locked while it has a name."""

    def __init__(self, folder: Path, session: str) -> None:
        """Make it, with a header only.

        Raises:
            OSError: the folder does not exist or has no room.
        """
        remove_stale(folder)
        self.path, self._file = _make_locked(folder)
        self._file.write(session.encode().ljust(_HEADER_BYTES, b"\0"))
        self._file.flush()

    def grow(self, slot_bytes: int) -> mmap.mmap:
        """Make room for the slots and map them; writable.

        Raises:
            OSError: the memory file system has not that much room.
        """
        size = _HEADER_BYTES + NUM_SLOTS * slot_bytes
        # Without the reservation, a write beyond the limit of the file system would end the process.
        os.posix_fallocate(self._file.fileno(), 0, size)
        return _mapped(self._file, size)

    def remove(self) -> None:
        """Take its name away; who has mapped it keeps the memory. Harmless the second time."""
        if not self._file.closed:
            self.path.unlink(missing_ok=True)
            self._file.close()


class FileSlots:
    """Slots of the file, mapped by one process."""

    def __init__(self, mapped: mmap.mmap, slot_bytes: int, *, file: SharedFile | None = None) -> None:
        """`file`: of the sender, which takes its name away."""
        self._file = file
        self._slots = _slots(mapped, slot_bytes)

    @property
    def slots(self) -> Sequence[Tensor]:
        """As of `SlotMemory`."""
        return self._slots

    def settle(self) -> None:
        """Nothing to do: copies into pageable host memory are done when they return."""

    def all_have_it(self) -> None:
        """All receivers have mapped the file: its name goes."""
        if self._file is not None:
            self._file.remove()

    def close(self) -> None:
        """Give the memory back, and the name of a file that was not mapped by all."""
        self.all_have_it()
        self._slots = []


def file_slots(file: SharedFile, slot_bytes: int) -> FileSlots:
    """Slots of the sender's own file; OSError when the memory file system has no room for them."""
    return FileSlots(file.grow(slot_bytes), slot_bytes, file=file)


def opened_file_slots(plan: Plan, *, session: str, is_written: bool = False) -> FileSlots:
    """Slots of the sender's file in another process.

    Args:
        plan: of the sender.
        session: secret that the file begins with.
        is_written: this process fills slots; else it maps them read only.

    Raises:
        ConnectionError: the file is gone, is on another node or is not that of this session.
    """
    path = Path(plan.path)
    size = _HEADER_BYTES + NUM_SLOTS * plan.slot_bytes
    try:
        if is_written:
            with os.fdopen(os.open(path, _SAFELY | os.O_RDWR), "r+b") as file:
                mapped = _mapped(file, size)
        else:
            with _opened(path) as file:
                mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ConnectionError(f"the sender's shared memory {path} cannot be mapped: {error}") from error
    if not _is_of_session(mapped[:_HEADER_BYTES], session):
        raise ConnectionError(f"the shared memory {path} belongs to another session of a weight sync")
    return FileSlots(mapped, plan.slot_bytes)


def shares_memory(path: Path, session: str) -> bool:
    """True if this process sees the sender's file: the same node, and the same memory file system on it."""
    try:
        with _opened(path) as file:
            return _is_of_session(file.read(_HEADER_BYTES), session)
    except OSError:
        return False


def remove_stale(folder: Path) -> None:
    """Remove the files of senders that were killed before their receivers had mapped them."""
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _opened(path) as file:  # somebody else's, in use, or gone already
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _make_locked(folder: Path) -> tuple[Path, IO[bytes]]:
    while True:
        path = folder / f"{PREFIX}{secrets.token_hex(8)}"
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w+b")
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():  # else taken for a stale one between the two lines above
            return path, file
        file.close()


def _opened(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, _SAFELY | os.O_RDONLY), "rb")


def _mapped(file: IO[bytes], size: int) -> mmap.mmap:
    """A file that others read, writable, with its pages there: one that is touched later costs more than its copy."""
    return mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _is_of_session(header: bytes, session: str) -> bool:
    return header.rstrip(b"\0") == session.encode()


def _slots(mapped: mmap.mmap, slot_bytes: int) -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # and nobody writes
        return [
            torch.frombuffer(
                mapped, dtype=torch.uint8, offset=_HEADER_BYTES + slot * slot_bytes, count=slot_bytes
            )
            for slot in range(NUM_SLOTS)
        ]
