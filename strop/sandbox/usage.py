"""Processor time of a sandbox, and its memory without a control group, measured by the launcher.

The processes are listed in the sandbox's own /proc, of which the first process has sent a handle: all that exist, by
rising number, so that none can hide by changing its parent. Where no /proc can be mounted they are walked from parent
to child.

Processor time without a group that counts it has two estimates, and the larger one counts. The sum over the living
processes and of their dead children is exact for children that are waited for; orphans come to the
first process, which waits for all. The kernel throws away the time of children whose parent ignores their end, so
there is a sample as well: the time between two measurements for each process that is seen for the first time while it
runs, and after that its own processor time. Measurements come at random times, so that no process can be asleep at each
of them. The sample is right on average; _MARGIN keeps chance from ending a program that is within its limit.

Memory is what processes hold for themselves (with the pages in swap), their page tables, and the most that the kernel
may hold for sockets and pipes: every socket can have two send buffers in flight, the packet that exceeds its
limit included, and every file that is open may be a pipe. Pages shared by a fork count in each process. Files in memory
have limits.disk_mib.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from strop.sandbox.cgroups import Group

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MARGIN = 1.25
"""Factor by which the sampled processor time may exceed the limit."""
_MAX_SEEN = 4096
_FREE_FILES = 16
"""Open files of a process that are not taken for pipes."""
_FIRST_TABLE = 64
"""Size of the kernel's table for a process that has opened few files."""
_PIPE_BYTES = 1 << 16
"""Capacity of a pipe; the filter lets no program raise it."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Processor time and memory of a sandbox."""

    cpu_s: float
    """Processor time since it began, in seconds."""
    memory_bytes: int
    """Memory at this time; 0 where a control group counts it."""


@dataclass(kw_only=True)
class _Process:
    """One process at one measurement."""

    started: int
    """Ticks since the machine started; with the number it names the process for good."""
    ticks: int
    """Processor time of its own."""
    of_children: int
    """Processor time that its dead children have left it."""
    is_running: bool
    memory_bytes: int = 0


class Meter:
    """Measures one sandbox."""

    def __init__(self, pid: int, group: Group | None) -> None:
        """Args:
        pid: the first process of the sandbox, as this process sees it.
        group: the control groups of the sandbox.
        """
        self._pid = pid
        self._group = group
        self._proc_fd: int | None = None
        self._setup_s = 0.0
        self._ticks_by_process: dict[tuple[int, int], int] = {}
        self._sampled_s = 0.0
        self._cpu_s = 0.0
        self._last_measured = 0.0
        self._socket_bytes = _socket_bytes() if group is None else 0

    def use(self, proc_fd: int) -> None:
        """List the processes in this folder, the /proc of the sandbox; it is closed with the meter."""
        self._proc_fd = proc_fd

    def close(self) -> None:
        if self._proc_fd is not None:
            os.close(self._proc_fd)
            self._proc_fd = None

    def begin(self, now: float) -> None:
        """The program starts: time that the sandbox has used so far is not the program's."""
        self._last_measured = now
        first = self._read(str(self._pid), None)
        if self._group is not None:
            self._setup_s = self._group.cpu_s() or 0.0
        elif first is not None:
            self._setup_s = first.ticks / _TICKS_PER_S

    def measure(self, now: float) -> Usage:
        """Measure."""
        cpu_s = self._group.cpu_s() if self._group is not None else None
        memory_bytes = 0
        if cpu_s is None or self._group is None:
            elapsed_s, self._last_measured = now - self._last_measured, now
            cpu_s, memory_bytes = self._measure_processes(elapsed_s)
        self._cpu_s = max(self._cpu_s, cpu_s - self._setup_s)
        return Usage(cpu_s=self._cpu_s, memory_bytes=0 if self._group is not None else memory_bytes)

    def end(self, waited_s: float) -> float:
        """Processor time of the program; waited_s: of the first process and all it waited for, from the kernel."""
        return max(self._cpu_s, waited_s - self._setup_s)

    def _measure_processes(self, elapsed_s: float) -> tuple[float, int]:
        """Processor seconds since the sandbox began, and bytes of memory."""
        ticks, memory_bytes = 0, self._sockets() * self._socket_bytes
        ticks_by_process: dict[tuple[int, int], int] = {}
        for number, (name, folder) in enumerate(self._process_names()):
            if number >= _MAX_SEEN:
                break
            process = self._read(name, folder)
            if process is None:
                continue
            ticks += process.ticks + process.of_children
            memory_bytes += process.memory_bytes
            key = (int(name), process.started)
            ticks_before = self._ticks_by_process.get(key)
            ticks_by_process[key] = process.ticks
            if ticks_before is not None:
                self._sampled_s += (process.ticks - ticks_before) / _TICKS_PER_S
            elif number > 0:  # not the first process
                seen_s = elapsed_s * _share_of_time(name, folder) if process.is_running else 0.0
                self._sampled_s += max(process.ticks / _TICKS_PER_S, seen_s)
        self._ticks_by_process = ticks_by_process
        return max(ticks / _TICKS_PER_S, self._setup_s + self._sampled_s / _MARGIN), memory_bytes

    def _process_names(self) -> Iterator[tuple[str, int | None]]:
        """Names of the folders of the processes, the first process first, and the folder they lie in; None: /proc."""
        if self._proc_fd is not None:
            names = sorted((name for name in _list_folder(self._proc_fd) if name.isdigit()), key=int)
            yield from ((name, self._proc_fd) for name in names)
            return
        waiting = [str(self._pid)]
        while waiting:
            name = waiting.pop()
            yield name, None
            with contextlib.suppress(OSError):
                for thread in Path(f"/proc/{name}/task").iterdir():
                    waiting += (thread / "children").read_text(encoding="ascii").split()

    def _read(self, name: str, folder: int | None) -> _Process | None:
        """One process; None where it is gone."""
        try:
            fields = _text(f"{name}/stat", folder).rpartition(")")[2].split()
            process = _Process(
                started=int(fields[19]), ticks=int(fields[11]) + int(fields[12]),
                of_children=int(fields[13]) + int(fields[14]), is_running=fields[0] == "R",
            )  # fmt: skip
            if self._group is None:
                process.memory_bytes = _memory_bytes(name, folder)
        except (OSError, ValueError, IndexError):
            return None
        return process

    def _sockets(self) -> int:
        """Number of sockets in the network of the sandbox."""
        name, folder = (str(self._pid), None) if self._proc_fd is None else ("1", self._proc_fd)
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(_text(f"{name}/net/sockstat", folder).split("\n", 1)[0].split()[2])
        return 0


def _memory_bytes(name: str, folder: int | None) -> int:
    facts = dict(line.split(":", 1) for line in _text(f"{name}/status", folder).splitlines() if ":" in line)
    kib = sum(int(facts.get(key, "0").split()[0]) for key in ("RssAnon", "VmSwap", "VmPTE"))
    files = int(facts.get("FDSize", "0"))
    if files > _FIRST_TABLE:
        with contextlib.suppress(OSError):
            files = _count_files(f"{name}/fd", folder)
    else:
        files = 0
    return (kib << 10) + max(0, files - _FREE_FILES) * _PIPE_BYTES


def _share_of_time(name: str, folder: int | None) -> float:
    """Share of its runnable time since its start that a process ran."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        run_ns, wait_ns = map(int, _text(f"{name}/schedstat", folder).split()[:2])
        if run_ns + wait_ns > 0:
            return run_ns / (run_ns + wait_ns)
    return 1.0


def _text(path: str, folder: int | None) -> str:
    """A file of /proc, or of the folder."""
    fd = os.open(path if folder is not None else f"/proc/{path}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(fd, 1 << 13).decode("utf-8", errors="replace")
    finally:
        os.close(fd)


def _list_folder(folder: int) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def _count_files(path: str, folder: int | None) -> int:
    fd = os.open(path if folder is not None else f"/proc/{path}", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    try:
        return len(os.listdir(fd))  # noqa: PTH208 (a handle, not a path)
    finally:
        os.close(fd)


def _socket_bytes() -> int:
    """The most that one socket of the sandbox can have in flight."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/net/core/wmem_default").read_text(encoding="ascii")) * 2
    return 1 << 19
