"""The launcher's eye on one sandbox: what goes in and out of its pipes, and every limit that needs a clock.

It waits for the pipes, the driver's socket and the nearest limit, and ends once the sandbox has closed all pipes. The
first limit that is reached kills the first process of the sandbox, and with it all of them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.rewards.sandbox.cgroups import Group
from strop.rewards.sandbox.inside import Ends

SETUP_S = 20.0
"""Limit for building a sandbox, in seconds."""
END_S = 10.0
"""Limit for the end of a sandbox that was killed, in seconds."""
_LOOK_S = 0.05
_LOOK_WITHOUT_GROUP_S = 0.02
"""How often processor time, and memory without a control group, are measured, in seconds."""
_READ_BYTES = 1 << 16
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_SEEN = 4096


class Watch:
    """One sandbox from its start to its end."""

    def __init__(
        self, *, pid: int, ends: Ends, limits: Mapping[str, Any], group: Group | None, stdin: bytes
    ) -> None:
        self._pid = pid
        self._ends = ends
        self._limits = limits
        self._group = group
        self._to_write = memoryview(stdin)
        self._cap = int(limits["output_kib"]) << 10
        self._streams = {ends.stdout: bytearray(), ends.stderr: bytearray()}
        self._is_truncated = False
        self._said = bytearray()
        self._open = {ends.status, ends.stdout, ends.stderr}
        self._deadline = time.monotonic() + SETUP_S
        self._cause = ""
        self._detail = ""
        self._ended = 0.0
        self._cpu_s = 0.0
        self._memory_bytes = 0
        self.is_abandoned = False
        """True where the driver went away."""
        self.started = 0.0
        """When the program started, on the system's monotonic clock; 0.0: it did not."""
        self._exit: dict[str, Any] | None = None

    def run(self, connection: socket.socket) -> None:
        """Watch until nothing of the sandbox is left."""
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        for fd in self._open:
            poller.register(fd, select.POLLIN)
        if self._to_write:
            poller.register(self._ends.stdin, select.POLLOUT)
        else:
            os.close(self._ends.stdin)
        look_s = _LOOK_S if self._group is not None else _LOOK_WITHOUT_GROUP_S
        next_look = 0.0
        while self._open:
            now = time.monotonic()
            if now >= self._deadline and not self._on_deadline(now):
                break
            if self.started and not self._cause and now >= next_look:
                self._look()
                next_look = time.monotonic() + look_s
            wait_s = min(self._deadline - now, look_s if self.started else SETUP_S)
            for fd, _event in poller.poll(max(1, int(wait_s * 1000))):
                if fd == connection.fileno():
                    self.is_abandoned = True
                    self._end("killed", "the driver went away")
                    poller.unregister(fd)
                elif fd == self._ends.stdin:
                    self._feed(poller)
                else:
                    self._take(fd, poller)
        self._bury()

    def _on_deadline(self, now: float) -> bool:
        """End the sandbox; False when it was ended before and is still there."""
        if self._cause or self._exit is not None:
            self._detail = f"a killed sandbox did not end within {END_S:g} s"
            self._cause = "infrastructure"
            return False
        if self.started:
            self._end(
                "timeout", f"the program did not finish in {self._limits['wall_s']:g} s (limits.wall_s)"
            )
        else:
            self._end("infrastructure", f"the sandbox was not ready within {SETUP_S:g} s")
        return True

    def _end(self, cause: str, detail: str) -> None:
        if self._cause or (self._exit is not None and cause != "output"):
            return
        self._cause, self._detail = cause, detail
        self._ended = time.monotonic()
        self._deadline = self._ended + END_S
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def _feed(self, poller: select.poll) -> None:
        try:
            self._to_write = self._to_write[os.write(self._ends.stdin, self._to_write[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the program reads no further
            self._to_write = memoryview(b"")
        if not self._to_write:
            poller.unregister(self._ends.stdin)
            os.close(self._ends.stdin)

    def _take(self, fd: int, poller: select.poll) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            poller.unregister(fd)
            self._open.discard(fd)
        elif fd == self._ends.status:
            self._said += data
            while (end := self._said.find(b"\n")) >= 0:
                self._hear(json.loads(bytes(self._said[:end])))
                del self._said[: end + 1]
        else:
            kept = self._streams[fd]
            room = self._cap - len(kept)
            kept += data[:room]
            if len(data) > room:
                self._is_truncated = True
                name = "standard output" if fd == self._ends.stdout else "standard error"
                self._end(
                    "output",
                    f"the program wrote more than {self._cap >> 10} KiB of {name} (limits.output_kib)",
                )

    def _hear(self, message: Mapping[str, Any]) -> None:
        if "started" in message:
            self.started = float(message["started"])
            self._deadline = self.started + float(self._limits["wall_s"])
        elif "failed" in message:
            self._cause, self._detail = (
                "infrastructure",
                f"the sandbox could not be built: {message['failed']}",
            )
            self._deadline = time.monotonic() + END_S
        elif not self._cause:
            self._exit = dict(message)
            self._ended = time.monotonic()
            self._deadline = self._ended + END_S

    # --- limits that are measured ---

    def _look(self) -> None:
        cpu_s, memory_bytes = measure(self._pid)
        self._cpu_s = max(self._cpu_s, cpu_s)
        self._memory_bytes = max(self._memory_bytes, memory_bytes)
        if cpu_s > self._limits["cpu_s"]:
            self._end("timeout", self._cpu_sentence())
        elif (
            memory_bytes > self._limits["memory_mib"] << 20 if self._group is None else self._group.ran_out()
        ):  # the kernel ended one process; the others would wait for it
            self._end("memory", self._memory_sentence())

    def _cpu_sentence(self) -> str:
        return f"the program used more than {self._limits['cpu_s']:g} s of processor time (limits.cpu_s)"

    def _memory_sentence(self) -> str:
        return f"the program used more than {self._limits['memory_mib']} MiB of memory (limits.memory_mib)"

    def _bury(self) -> None:
        until = time.monotonic() + END_S
        while True:
            ended, _status, usage = os.wait4(self._pid, os.WNOHANG)
            if ended:
                self._cpu_s = max(self._cpu_s, usage.ru_utime + usage.ru_stime)
                # The largest of its processes; the first one alone is a copy of the launcher.
                self._memory_bytes = max(self._memory_bytes, usage.ru_maxrss << 10)
                return
            if time.monotonic() > until:
                self._cause, self._detail = (
                    "infrastructure",
                    f"a killed sandbox did not end within {END_S:g} s",
                )
                return
            if self._exit is None or time.monotonic() > until - END_S / 2:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.001)

    # --- the verdict ---

    def answer(self) -> dict[str, Any] | None:
        """What the driver is told; None where there is none any more."""
        if self.is_abandoned:
            return None
        outcome, detail, code = self._verdict()
        peak = self._group.peak_bytes() if self._group is not None else 0
        stdout, stderr = (self._streams[fd] for fd in (self._ends.stdout, self._ends.stderr))
        return {
            "outcome": outcome, "error": detail, "is_truncated": self._is_truncated,
            "exit_code": code if code is not None and code >= 0 else None,
            "signal": -code if code is not None and code < 0 else None,
            "stdout": base64.b64encode(stdout).decode("ascii"), "stderr": base64.b64encode(stderr).decode("ascii"),
            "started": self.started, "wall_s": max(0.0, self._ended - self.started) if self.started else 0.0,
            "cpu_s": self._cpu_s, "memory_bytes": peak or self._memory_bytes,
            "files": (self._exit or {}).get("files", {}), "is_broken": "did not end" in detail,
        }  # fmt: skip

    def _verdict(self) -> tuple[str, str, int | None]:
        """Outcome, sentence, exit code (negative: signal)."""
        if self._cause == "infrastructure":
            return self._cause, self._detail, None
        if self._group is not None and self._group.ran_out():
            return "memory", self._memory_sentence(), None
        if self._cause:
            return self._cause, self._detail, None
        stderr = bytes(self._streams[self._ends.stderr])
        if self._exit is None:
            said = stderr[-300:].decode(errors="replace").strip() if not self.started else ""
            return (
                "infrastructure",
                f"the first process of the sandbox ended without a word {said}".rstrip(),
                None,
            )
        code = int(self._exit["exit"])
        if code == 0:
            return "ok", "", 0
        if code == -signal.SIGXCPU or (code == -signal.SIGKILL and self._cpu_s >= self._limits["cpu_s"]):
            return "timeout", self._cpu_sentence(), code
        if code > 0 and stderr.rstrip().rpartition(b"\n")[2].startswith(b"MemoryError"):
            return "memory", self._memory_sentence(), code
        if code < 0:
            known = {int(one): one.name for one in signal.Signals}
            return "killed", f"the program died with {known.get(-code, f'signal {-code}')}", code
        return "error", str(self._exit.get("note", f"the program exited with code {code}")), code


def measure(pid: int) -> tuple[float, int]:
    """Processor seconds and bytes of memory of a process and all below it, as the host sees them.

    Memory is what the processes hold for themselves; pages of files and of shared memory are counted where they lie
    (limits.disk_mib). A process that ends meanwhile is left out.
    """
    ticks, pages = 0, 0
    waiting, seen = [pid], 0
    while waiting and seen < _MAX_SEEN:
        folder = Path(f"/proc/{waiting.pop()}")
        seen += 1
        with contextlib.suppress(OSError, ValueError):
            fields = (
                (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            )
            ticks += sum(map(int, fields[11:15]))  # own and waited-for children, user and system
            numbers = (folder / "statm").read_text(encoding="ascii").split()
            pages += max(0, int(numbers[1]) - int(numbers[2]))
            for thread in (folder / "task").iterdir():
                waiting += map(int, (thread / "children").read_text(encoding="ascii").split())
    return ticks / _TICKS_PER_S, pages * _PAGE_BYTES
