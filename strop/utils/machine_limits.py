"""Cores and memory that this process may still use, within its control groups."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_V1, _V2 = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ("memory.max", "memory.current", "inactive_file"),
)
"""Files of a control group with its limit and its use, and the entry of memory.stat that the kernel can reclaim."""


def usable_cores(*, root: Path = Path("/")) -> int:
    """Cores that this process may be scheduled on, within the CPU quota of its control groups; at least 1.

    A container may show 64 cores and give the time of two: more threads than that are stopped in turn, and those that
    run wait for them. A quota of part of a core is rounded down.

    Args:
        root: where `proc` and `sys` are.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    for folder, is_first_version in _control_groups(root, "cpu"):
        with contextlib.suppress(OSError, ValueError):  # no such file; `max`
            if is_first_version:
                quota = int((folder / "cpu.cfs_quota_us").read_text())
                period = int((folder / "cpu.cfs_period_us").read_text())
            else:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            if quota > 0:
                cores = min(cores, quota // period)
    return max(cores, 1)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken: on an accelerator also what torch holds unused; on a CPU what the machine and the
    control groups of this process leave, with the caches that the kernel gives up."""
    if device.type == "cpu":
        return host_free_bytes()
    import torch  # heavy: asked for only where there is an accelerator

    free, total = torch.accelerator.get_memory_info(device)
    reserved = torch.accelerator.memory_reserved(device)
    free = min(free, max(0, int(_share_of_process(device) * total) - reserved))
    return int(free + reserved - torch.accelerator.memory_allocated(device))


def device_bytes(device: torch.device) -> int:
    """Memory of an accelerator that this process may have: all of it, or the share to which torch's allocator is set
    (`per_process_memory_fraction`)."""
    import torch  # heavy: asked for only where there is an accelerator

    return int(_share_of_process(device) * torch.accelerator.get_memory_info(device)[1])


def _share_of_process(device: torch.device) -> float:
    import torch  # heavy: asked for only where there is an accelerator

    # Without a number, of the current one.
    return torch.cuda.get_per_process_memory_fraction(device.index) if device.type == "cuda" else 1.0


def host_free_bytes(root: Path = Path("/")) -> int:
    """Free memory of the machine, or of the narrowest control group around this process; `root` holds proc and sys."""
    meminfo = root / "proc/meminfo"
    if not meminfo.is_file():  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = numbers_in(meminfo)
    free = 1024 * facts["MemAvailable:"]
    for folder, is_first_version in _control_groups(root, "memory"):
        free = min(free, _left(folder, *(_V1 if is_first_version else _V2), otherwise=free))
    return max(free, 0)


def _control_groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """The folders of the control groups around this process that limit something, the narrowest first, and whether
    each is of the first version."""
    try:
        text = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2):
        # The number of a tree, its controllers (of the second version: none), the group in it.
        if controllers and controller not in controllers.split(","):
            continue
        tree = root / "sys/fs/cgroup" / controllers
        group = tree / path.lstrip("/")  # a container may see its own group at the root of the tree
        for folder in (group, *group.parents):
            yield folder, bool(controllers)
            if folder == tree:
                break


def _left(folder: Path, limit: str, use: str, spare: str, *, otherwise: int) -> int:
    """Memory that a control group leaves; `otherwise` without a limit."""
    if not (folder / limit).is_file() or not (folder / use).is_file():
        return otherwise
    most = (folder / limit).read_text(encoding="utf-8").strip()
    if most == "max":
        return otherwise
    used = int((folder / use).read_text(encoding="utf-8"))
    return int(most) - used + numbers_in(folder / "memory.stat").get(spare, 0)


def numbers_in(file: Path) -> dict[str, int]:
    """The first number of each line, by its first word."""
    if not file.is_file():
        return {}
    lines = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
