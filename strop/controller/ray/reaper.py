"""Reaper of a private cluster: ends the processes that are left when its controller is gone.

Ray's servers die with the process that started them, and workers see that and end. Some helpers of Ray linger
for a minute, though, and what a worker's own code started may never end. The reaper waits until its parent
(the controller) dies or tells it to; then it gives the cluster's processes a moment and kills the rest. It
knows them by an open file below the cluster's session folder, or by a mark in their environment. It imports
the standard library only. Where there is no /proc it does nothing.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

MARK = "STROP_CLUSTER"
"""Environment variable that the processes of a private cluster inherit."""
_LOOK_S = 0.5
"""Interval of the check for the reaper's parent, should the pipe not tell."""
_GRACE_S = 3.0
"""Time for processes to end by themselves."""
_STOP_S = 15.0
"""Timeout of the reaper's end of all processes."""
_PROC = Path("/proc")


class Reaper:
    """The reaper of one cluster, seen from the controller."""

    def __init__(self, mark: str, session: str, folder: str) -> None:
        """Start it.

        Args:
            mark: value of `MARK` in the environment of the cluster's processes.
            session: folder that they keep files open in.
            folder: all files of the cluster, removed at the end.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark, session, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at the terminal is for the controller alone
        )

    def stop(self) -> None:
        """Have it end the remaining processes of the cluster, and wait for that."""
        assert self._process.stdin is not None, "it was opened as a pipe"
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def new_mark() -> str:
    """A mark that no other cluster has."""
    return uuid.uuid4().hex


def main(mark: str, session: str, folder: str) -> None:
    """Wait for the end of the parent, or of the pipe from it; then end the cluster's processes and remove its files."""
    parent = os.getppid()
    while os.getppid() == parent and not select.select([sys.stdin], [], [], _LOOK_S)[0]:
        pass
    end = time.monotonic() + _GRACE_S
    while (pids := _remaining_processes(mark, session)) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            continue  # it has ended in between
    shutil.rmtree(folder, ignore_errors=True)


def _remaining_processes(mark: str, session: str) -> list[int]:
    """Living processes of the cluster that this user may look into."""
    numbers = (
        [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal()] if _PROC.is_dir() else []
    )
    return [
        pid
        for pid in numbers
        if pid not in (os.getpid(), os.getppid()) and _is_of_cluster(pid, mark, session)
    ]


def _is_of_cluster(pid: int, mark: str, session: str) -> bool:
    folder = _PROC / str(pid)
    try:
        if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
            return True
        return any(_target(file).startswith(f"{session}/") for file in (folder / "fd").iterdir())
    except OSError:  # it has ended, or belongs to another user
        return False


def _target(file: Path) -> str:
    try:
        return str(file.readlink())
    except OSError:
        return ""


if __name__ == "__main__":
    main(*sys.argv[1:4])
