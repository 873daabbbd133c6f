"""Buckets through shared memory, for a sender and receivers on one node.

One file of the node's memory file system holds two slots of a bucket each. The ranks of the sender fill one together,
each with its part of the weights, while the receivers read the other. A bucket is announced on the channel when it
lies in its slot, which is filled again when every receiver has said there that it is done with it.

The file has a name only until all receivers have mapped it, so the memory is given back however the processes end.
For a process that was killed in that short time, the next sender removes the file: its owner holds a lock on it that
ends with the process.

Tensors of an accelerator go through host memory; sharing device memory between processes is left out.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import warnings
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from strop.rollout.weight_sync.channel import ReceiverChannel, SenderChannel
from strop.rollout.weight_sync.transport import Plan

FOLDER = Path("/dev/shm")
"""Folder in which Linux keeps files in memory."""
PREFIX = "strop-weights-"
NUM_SLOTS = 2
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


class SharedMemorySender:
    """The sender's side."""

    def __init__(self, channel: SenderChannel, file: SharedFile, *, made_in: int, slot_bytes: int) -> None:
        """Raises OSError when the memory file system has no room for two slots."""
        self._channel = channel
        self._file = file
        self._slots = _slots(file.grow(slot_bytes), slot_bytes)
        self._piece = 0
        self.plan = Plan(name="shared_memory", made_in=made_in, path=str(file.path), slot_bytes=slot_bytes)

    def begin(self) -> None:
        """Start at the first slot. All receivers are ready, so they have mapped the file: its name goes."""
        self._file.remove()
        self._piece = 0

    def room(self, num_bytes: int) -> Tensor:
        """Memory [n] uint8 of the next bucket, once every receiver is done with what lay there.

        Raises:
            ConnectionError, TimeoutError, ReceiverFailed: as of the channel.
        """
        if self._piece >= NUM_SLOTS:
            before = self._piece - NUM_SLOTS
            self._channel.hear("read", before, f"to read piece {before} of the shared memory")
        return self._slots[self._piece % NUM_SLOTS][:num_bytes]

    def send(self, data: Tensor) -> None:
        """Hand on the bucket [n] uint8 that was put into the `room`."""
        assert data.data_ptr() == self._slots[self._piece % NUM_SLOTS].data_ptr(), (
            "it lies where there was room"
        )
        self._piece += 1

    def finish(self) -> None:
        """Nothing to do: the last pieces lie in the slots until the receivers have answered the commit."""

    def close(self) -> None:
        """Give the memory back."""
        self._file.remove()
        self._slots = []


class SharedMemoryHelper:
    """The side of another rank of the sender, which helps to fill the slots."""

    def __init__(self, plan: Plan, *, session: str) -> None:
        """Map the file of rank 0.

        Raises:
            OSError: this process does not see it: another node.
        """
        self.plan = plan
        path = Path(plan.path)
        with os.fdopen(os.open(path, _SAFELY | os.O_RDWR), "r+b") as file:
            if not _is_of_session(file.read(_HEADER_BYTES), session):
                raise OSError(f"{path} belongs to another session of a weight sync")
            self._slots = _slots(_mapped(file, _HEADER_BYTES + NUM_SLOTS * plan.slot_bytes), plan.slot_bytes)
        self._piece = 0

    def begin(self) -> None:
        """Start at the first slot."""
        self._piece = 0

    def room(self, num_bytes: int) -> Tensor:
        """Memory [n] uint8 of the next bucket, which rank 0 has found free."""
        self._piece += 1
        return self._slots[(self._piece - 1) % NUM_SLOTS][:num_bytes]


class SharedMemoryReceiver:
    """The side of one receiver."""

    def __init__(self, channel: ReceiverChannel, plan: Plan, *, session: str) -> None:
        """Map the sender's file, read only.

        Raises:
            ConnectionError: the file is gone or is not that of this session.
        """
        self.plan = plan
        self._channel = channel
        path = Path(plan.path)
        size = _HEADER_BYTES + NUM_SLOTS * plan.slot_bytes
        try:
            with _opened(path) as file:
                mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConnectionError(f"the sender's shared memory {path} cannot be mapped: {error}") from error
        if not _is_of_session(mapped[:_HEADER_BYTES], session):
            raise ConnectionError(f"the shared memory {path} belongs to another session of a weight sync")
        self._slots = _slots(mapped, plan.slot_bytes)
        self._piece = 0
        self._in_use: int | None = None

    def begin(self) -> None:
        """Start at the first slot."""
        self._piece, self._in_use = 0, None

    def receive(self, num_bytes: int) -> Tensor:
        """The slot itself."""
        self.finish()
        slot = self._slots[self._piece % NUM_SLOTS]
        self._in_use = self._piece
        self._piece += 1
        return slot[:num_bytes]

    def finish(self) -> None:
        """Tell the sender that the last piece was read."""
        if self._in_use is not None:
            self._channel.tell("read", number=self._in_use)
            self._in_use = None

    def close(self) -> None:
        """Give the memory back."""
        self._slots = []


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
