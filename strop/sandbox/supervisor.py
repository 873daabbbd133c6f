"""Supervision of one sandbox by its launcher: its pipes, every limit that needs a clock, and the outcome.

It waits for the pipes, the driver's socket and the nearest limit, and ends once the sandbox has closed all pipes. The
first limit that is reached kills the first process of the sandbox, and with it all of them.

Blame for an end: until the first process reports that the program begins, nothing of the program has run, so an error
is the machine's (`infrastructure`). After that none is: a sandbox that ends, hangs or falls silent then
does so with the program in it, which then earns nothing. A limit is named only where it was measured here
or counted by the kernel, never because of an exit code, a signal or a text, all of which a program can choose.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import select
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

from strop.sandbox.cgroups import Group
from strop.sandbox.init_process import Ends
from strop.sandbox.usage import Meter

SETUP_S = 20.0
"""Limit for building a sandbox, in seconds."""
END_S = 10.0
"""Limit for the end of a sandbox that was killed, in seconds."""
_INTERVAL_S = 0.05
_INTERVAL_WITHOUT_GROUP_S = 0.02
"""Mean interval between measurements of processor time, and of memory without a control group, in seconds; each is
drawn from half to one and a half times that, so that no program knows when."""
_READ_BYTES = 1 << 16


class Supervisor:
    """Supervises one sandbox from its start to its end."""

    def __init__(
        self,
        *,
        pid: int,
        ends: Ends,
        limits: Mapping[str, Any],
        group: Group | None,
        meter: Meter,
        stdin: bytes,
    ) -> None:
        self._pid = pid
        self._meter = meter
        self._ends = ends
        self._limits = limits
        self._group = group
        self._to_write = memoryview(stdin)
        self._cap = int(limits["output_kib"]) << 10
        self._streams = {ends.stdout: bytearray(), ends.stderr: bytearray()}
        self._is_truncated = False
        self._reports = bytearray()
        self._open = {ends.status, ends.stdout, ends.stderr}
        self._deadline = time.monotonic() + SETUP_S
        self._cause = ""
        self._detail = ""
        self._has_begun = False
        self._is_stuck = False
        self._ended = 0.0
        self._cpu_s = 0.0
        self._memory_bytes = 0
        self.is_abandoned = False
        """True where the driver went away."""
        self.started = 0.0
        """Start of the program, on the system's monotonic clock; 0.0: it did not."""
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
        interval_s = _INTERVAL_S if self._group is not None else _INTERVAL_WITHOUT_GROUP_S
        next_measurement = 0.0
        while self._open:
            now = time.monotonic()
            if now >= self._deadline and not self._on_deadline():
                break
            if self.started and not self._cause and now >= next_measurement:
                self._measure()
                next_measurement = time.monotonic() + interval_s * random.uniform(0.5, 1.5)
            wait_s = min(self._deadline - now, interval_s if self.started else SETUP_S)
            for fd, _event in poller.poll(max(1, int(wait_s * 1000))):
                if fd == connection.fileno():
                    self.is_abandoned = True
                    self._end("killed", "the driver went away")
                    poller.unregister(fd)
                elif fd == self._ends.stdin:
                    self._write_stdin(poller)
                else:
                    self._read_pipe(fd, poller)
        self._reap()

    def _on_deadline(self) -> bool:
        """End the sandbox; False when it was ended before and is still there."""
        if self._cause or self._exit is not None:
            self._is_stuck = True
            return False
        if self._has_begun:
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

    def _write_stdin(self, poller: select.poll) -> None:
        try:
            self._to_write = self._to_write[os.write(self._ends.stdin, self._to_write[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the program reads no further
            self._to_write = memoryview(b"")
        if not self._to_write:
            poller.unregister(self._ends.stdin)
            os.close(self._ends.stdin)

    def _read_pipe(self, fd: int, poller: select.poll) -> None:
        try:
            data = self._read_status() if fd == self._ends.status else os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            poller.unregister(fd)
            self._open.discard(fd)
        elif fd == self._ends.status:
            self._reports += data
            while (end := self._reports.find(b"\n")) >= 0:
                self._handle_report(json.loads(bytes(self._reports[:end])))
                del self._reports[: end + 1]
        else:
            stream = self._streams[fd]
            room = self._cap - len(stream)
            stream += data[:room]
            if len(data) > room:
                self._is_truncated = True
                name = "standard output" if fd == self._ends.stdout else "standard error"
                self._end(
                    "output",
                    f"the program wrote more than {self._cap >> 10} KiB of {name} (limits.output_kib)",
                )

    def _read_status(self) -> bytes:
        """Bytes of the first process's reports; a handle on its /proc goes to the meter."""
        with socket.socket(fileno=os.dup(self._ends.status)) as connection:
            if self._has_begun:
                return connection.recv(_READ_BYTES)
            data, handles, _flags, _address = socket.recv_fds(connection, _READ_BYTES, 1)
        for handle in handles:
            self._meter.use(handle)
        return data

    def _handle_report(self, message: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if "begins" in message:
            self._has_begun = True
            self._meter.begin(now)
        elif "started" in message:
            self.started = float(message["started"])
            self._deadline = self.started + float(self._limits["wall_s"])
        elif "failed" in message:
            # Where the program runs, the first process fails of something that the program did.
            self._cause = "killed" if self.started else "infrastructure"
            event = "the program ended its sandbox" if self.started else "the sandbox could not be built"
            self._detail = f"{event}: {message['failed']}"
            self._ended = now
            self._deadline = now + END_S
        elif "exit" in message and not self._cause:
            self._exit = dict(message)
            self._ended = now
            self._deadline = now + END_S

    # --- limits that are measured ---

    def _measure(self) -> None:
        usage = self._meter.measure(time.monotonic())
        self._cpu_s = usage.cpu_s
        self._memory_bytes = max(self._memory_bytes, usage.memory_bytes)
        if usage.cpu_s > self._limits["cpu_s"]:
            self._end("timeout", self._cpu_sentence())
        elif (
            usage.memory_bytes > self._limits["memory_mib"] << 20
            if self._group is None
            else self._group.ran_out()
        ):  # the kernel ended one process; the others would wait for it
            self._end("memory", self._memory_sentence())

    def _cpu_sentence(self) -> str:
        return f"the program used more than {self._limits['cpu_s']:g} s of processor time (limits.cpu_s)"

    def _memory_sentence(self) -> str:
        return f"the program used more than {self._limits['memory_mib']} MiB of memory (limits.memory_mib)"

    def _reap(self) -> None:
        deadline = time.monotonic() + END_S
        while True:
            ended, _status, usage = os.wait4(self._pid, os.WNOHANG)
            if ended:
                if self._has_begun:
                    self._cpu_s = self._meter.end(usage.ru_utime + usage.ru_stime)
                # The largest of its processes; the first one alone is a copy of the launcher.
                self._memory_bytes = max(self._memory_bytes, usage.ru_maxrss << 10)
                return
            if time.monotonic() > deadline:
                self._is_stuck = True
                return
            if self._exit is None or time.monotonic() > deadline - END_S / 2:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pid, signal.SIGKILL)
            time.sleep(0.001)

    # --- the verdict ---

    def answer(self) -> dict[str, Any] | None:
        """Answer to the driver; None where it went away."""
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
            "files": (self._exit or {}).get("files", {}), "is_broken": self._is_stuck,
        }  # fmt: skip

    def _verdict(self) -> tuple[str, str, int | None]:
        """Outcome, sentence, exit code (negative: signal)."""
        if self._cause == "infrastructure":
            return self._cause, self._detail, None
        if self._group is not None and self._group.ran_out():
            return "memory", self._memory_sentence(), None
        if self._cause:
            return self._cause, self._detail, None
        if self._exit is None and self._has_begun:
            return "killed", "the program ended its sandbox", None
        if self._exit is None:
            error_output = bytes(self._streams[self._ends.stderr])[-300:].decode(errors="replace").strip()
            return (
                "infrastructure",
                f"the first process of the sandbox ended without a word {error_output}".rstrip(),
                None,
            )
        code = int(self._exit["exit"])
        if code == 0:
            return "ok", "", 0
        if code in (-signal.SIGKILL, -signal.SIGXCPU) and self._cpu_s >= self._limits["cpu_s"]:
            return "timeout", self._cpu_sentence(), code  # the kernel was faster (RLIMIT_CPU)
        if code < 0:
            names = {int(member): member.name for member in signal.Signals}
            return "killed", f"the program died with {names.get(-code, f'signal {-code}')}", code
        return "error", str(self._exit.get("note", f"the program exited with code {code}")), code
