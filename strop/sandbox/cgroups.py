"""Control groups: memory and process limits for all processes of a sandbox together, where they can be made.

Both generations are supported: one tree (v2), or one per controller (v1). A group lies below the group
of the launcher. Where none can be made, `Group.create` returns None and the launcher measures the processes instead.
Processor time is counted where the groups do it (always in v2; v1 needs the controller cpuacct).
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_PREFIX = "strop-sandbox-"
_REMOVE_S = 2.0


def _homes() -> dict[str, Path]:
    """Folder of this process by controller ("memory", "pids", "cpuacct"), or {"": folder} for the one tree of v2."""
    paths = {}
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    homes: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, target, kind, options, *_ = line.split(" ")
        if kind == "cgroup":
            for controller in {"memory", "pids", "cpuacct"} & set(options.split(",")):
                homes[controller] = _below(target, paths.get(controller, "/"))
        elif kind == "cgroup2" and "" in paths:
            home = _below(target, paths[""])
            subtree_control = home / "cgroup.subtree_control"
            if {"memory", "pids"} <= set(
                subtree_control.read_text(encoding="utf-8").split() if subtree_control.is_file() else ()
            ):
                return {"": home}
    return homes


def _below(target: str, path: str) -> Path:
    home = Path(target + path)
    return home if home.is_dir() else Path(target)


class Group:
    """The control groups of one sandbox."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders

    @classmethod
    def create(cls, name: str, *, memory_bytes: int, max_processes: int) -> Group | None:
        """Groups with both limits; None where they cannot be made."""
        group = cls({})
        try:
            homes = _homes()
            for controller, home in homes.items():
                folder = home / f"{_PREFIX}{os.getpid()}-{name}"
                try:
                    folder.mkdir()
                except OSError:
                    if controller != "cpuacct":  # processor time can be measured without it
                        raise
                    continue
                group._folders[controller] = folder
            memory, pids = group._folder("memory"), group._folder("pids")
            if memory is None or pids is None:
                raise OSError("no group for memory or processes")
            is_v2 = "" in homes
            _write(memory / ("memory.max" if is_v2 else "memory.limit_in_bytes"), memory_bytes)
            with contextlib.suppress(OSError):  # a kernel without accounting of swap
                swap = (
                    (memory / "memory.swap.max", 0)
                    if is_v2
                    else (memory / "memory.memsw.limit_in_bytes", memory_bytes)
                )
                _write(*swap)
            _write(pids / "pids.max", max_processes)
        except OSError:
            group.remove()
            return None
        return group

    def _folder(self, controller: str) -> Path | None:
        return self._folders.get(controller, self._folders.get(""))

    def add(self, pid: int) -> None:
        """Put a process into the groups; its children follow."""
        for folder in self._folders.values():
            _write(folder / "cgroup.procs", pid)

    def peak_bytes(self) -> int:
        """Most memory at one time; 0 where the kernel does not say."""
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                return int(self._read(name))
        return 0

    def cpu_s(self) -> float | None:
        """Processor time of all processes that are or were in it, in seconds; None where no group counts it."""
        folder = self._folders.get("cpuacct", self._folders.get(""))
        if folder is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            if "cpuacct" in self._folders:
                return int((folder / "cpuacct.usage").read_text(encoding="ascii")) / 1e9
            facts = dict(
                line.split() for line in (folder / "cpu.stat").read_text(encoding="ascii").splitlines()
            )
            return int(facts["usage_usec"]) / 1e6
        return None

    def ran_out(self) -> bool:
        """True when the kernel ended a process because the memory was used up."""
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                facts = dict(line.split() for line in self._read(name).splitlines())
                return int(facts.get("oom_kill", 0)) > 0
        return False

    def _read(self, name: str) -> str:
        folder = self._folder("memory")
        assert folder is not None, "a group has a memory controller"
        return (folder / name).read_text(encoding="ascii")

    def remove(self) -> None:
        """Remove the groups; their processes are gone, or nearly."""
        deadline = time.monotonic() + _REMOVE_S
        for folder in self._folders.values():
            while True:
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.002)


def remove_left_over() -> None:
    """Remove empty groups of launchers that were killed."""
    with contextlib.suppress(OSError):
        for home in _homes().values():
            for folder in home.glob(f"{_PREFIX}*"):
                owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
                if not Path(f"/proc/{owner}").exists():
                    with contextlib.suppress(OSError):
                        folder.rmdir()


def _write(path: Path, value: int) -> None:
    path.write_text(str(value), encoding="ascii")
