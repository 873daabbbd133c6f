"""The driver's handle to one launcher process: start it, hand it a program, end it."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.sandbox import framing

_SANDBOX = Path(__file__).parent
EXIT_S = 5.0
"""Time that a launcher may take to end, in seconds, before it is killed."""
# A launcher imports this package alone: `strop` is an empty module there, so that it starts in a fraction of the time
# and has nothing of the library in memory.
_BOOT = """\
import json, sys, types
for name, folder in json.loads(sys.argv[1]):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [folder]
import strop.sandbox.launcher as launcher
launcher.main(int(sys.argv[2]))
"""
_PACKAGES = (("strop", _SANDBOX.parent), ("strop.sandbox", _SANDBOX))


class LauncherGone(OSError):
    """The launcher process ended, or did not answer in time."""


class Launcher:
    """One launcher; used by one thread at a time."""

    def __init__(self) -> None:
        """Start it; OSError when the system refuses."""
        self._connection, theirs = socket.socketpair()
        try:
            with theirs:
                packages = json.dumps([(name, str(folder)) for name, folder in _PACKAGES])
                # -I -S: nothing of the user's environment or packages reaches the launcher. A session of its own: a
                # Ctrl-C in the terminal is the driver's to handle.
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-B", "-c", _BOOT, packages, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),), start_new_session=True, cwd="/", env={"LANG": "C.UTF-8"},
                )  # fmt: skip
        except BaseException:
            self._connection.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def run(self, job: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Hand over a job and wait for the answer.

        Raises:
            LauncherGone: it ended, was interrupted, or took longer than timeout_s.
        """
        try:
            self._connection.settimeout(timeout_s)
            framing.send(self._connection, job)
            answer = framing.receive(self._connection)
        except (OSError, ValueError) as error:
            raise LauncherGone(f"the launcher did not answer: {error}") from error
        if answer is None:
            raise LauncherGone("the launcher ended")
        return answer

    def interrupt(self) -> None:
        """Interrupt it, from any thread: the program is ended, `run` raises, the launcher exits by itself."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """End the launcher and its sandbox; after EXIT_S it is killed."""
        self.interrupt()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._connection.close()
