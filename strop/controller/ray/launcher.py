"""Launcher of a worker process: starts it, waits for its end, and records how it ended.

Ray starts workers through it (`python -I -S launcher.py LOG COMMAND...`), because nobody but a parent learns
by which signal a process died and how much memory it held at most. It imports the standard library only and
stays at about ten MiB. Signals that end a process are handed on to the worker; the launcher ends right after the
worker, so that nothing is left behind.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_LINE = re.compile(
    r"^\[strop\] process (?P<pid>\d+) ended at (?P<at>[\d.]+) "
    r"(?:by signal (?P<signal>\w+)|with exit code (?P<code>\d+)), peak memory (?P<peak>\d+) bytes$",
    re.MULTILINE,
)


@dataclass(frozen=True, kw_only=True)
class ProcessEnd:
    """End of a process, as its launcher saw it."""

    pid: int
    """Its process id."""
    at: float
    """Time of the end, in seconds since the epoch."""
    exit_signal: str
    """Name of the signal that ended it; empty where none did."""
    exit_code: int | None
    """Its exit code; None where a signal ended it."""
    peak_memory_bytes: int
    """Most memory it held."""

    def line(self) -> str:
        """The last line of its log."""
        cause = f"by signal {self.exit_signal}" if self.exit_signal else f"with exit code {self.exit_code}"
        return (
            f"[strop] process {self.pid} ended at {self.at:.3f} {cause}, peak memory "
            f"{self.peak_memory_bytes} bytes\n"
        )


def process_end(pid: int, log: str) -> ProcessEnd | None:
    """End of a process, parsed from its log; None where the log does not have it (yet)."""
    for match in _LINE.finditer(log):
        if int(match["pid"]) == pid:
            return ProcessEnd(
                pid=pid,
                at=float(match["at"]),
                exit_signal=match["signal"] or "",
                exit_code=int(match["code"]) if match["code"] else None,
                peak_memory_bytes=int(match["peak"]),
            )
    return None


def main(log_path: Path, command: list[str]) -> int:
    """Run a command to its end, append its end to the log, and return its exit code."""
    process = subprocess.Popen(command)

    def hand_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, hand_on)
    _, status, usage = os.wait4(process.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    end = ProcessEnd(
        pid=process.pid,
        at=time.time(),
        exit_signal=_signal_name(-code) if code < 0 else "",
        exit_code=code if code >= 0 else None,
        peak_memory_bytes=usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    )
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("a", encoding="utf-8") as log:
        log.write(end.line())
    return max(code, 0)


def _signal_name(number: int) -> str:
    names = {member.value: member.name for member in signal.Signals}
    return names.get(number, f"signal{number}")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [sys.executable, *sys.argv[2:]]))
