"""One writer per run folder.

The kernel holds the lock (flock) and drops it when the writer ends, however it ends, so a lock of a dead
process is never in the way. The file also names the writer, for the message. On file systems without
flock the name in the file decides: a process that still lives on this host keeps the folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

from strop.run.errors import RunError
from strop.utils.safe_read import NotAFile, parse_json

_UNSUPPORTED = {errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL}


class RunLock:
    """The right to write a run folder, from `acquire` to `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            RunError: another process, or another object of this process, writes the run.
            OSError: the lock file cannot be made.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o644)
        try:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise NotAFile(self.path, mode)
            self._claim(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def _claim(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal(self._owner(descriptor)) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            owner = self._owner(descriptor)
            if owner and (owner.get("host") != socket.gethostname() or is_alive(owner.get("pid", 0))):
                raise self._refusal(owner) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    def _owner(self, descriptor: int) -> dict[str, Any]:
        try:
            owner = parse_json(os.pread(descriptor, 4096, 0))
        except ValueError:
            return {}
        return owner if isinstance(owner, dict) else {}

    def _refusal(self, owner: dict[str, Any]) -> RunError:
        pid, host = owner.get("pid", "(unknown)"), owner.get("host", socket.gethostname())
        on_host = "" if host == socket.gethostname() else f" on {host}"
        writer = "this process" if pid == os.getpid() and not on_host else f"process {pid}{on_host}"
        return RunError(
            f"the run {self.path.parent} is being written by {writer}: wait until it ends or stop it. "
            f"If no such process exists any more, remove {self.path}."
        )


def is_alive(pid: object) -> bool:
    """True while a process with this id exists; False for what is no id."""
    if type(pid) is not int or not 0 < pid < 2**31:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists and belongs to someone else
        return True
    return True
