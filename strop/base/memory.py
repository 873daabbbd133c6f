"""How much memory a device has left for this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_V1, _V2 = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ("memory.max", "memory.current", "inactive_file"),
)
"""What a control group calls its limit, its use, and, in memory.stat, the part of it that the kernel takes back."""


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken: on an accelerator also what torch holds unused; on a CPU what the machine and the
    control groups of this process leave, with the caches that the kernel gives up."""
    if device.type == "cpu":
        return host_free_bytes()
    import torch  # heavy: asked for only where there is an accelerator

    free, _ = torch.accelerator.get_memory_info(device)
    unused = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return int(free + unused)


def host_free_bytes(root: Path = Path("/")) -> int:
    """Free memory of the machine, or of the narrowest control group around this process; `root` holds proc and sys."""
    meminfo = root / "proc/meminfo"
    if not meminfo.is_file():  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = _numbers(meminfo)
    free = 1024 * facts["MemAvailable:"]
    for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        tree, names = (root / "sys/fs/cgroup/memory", _V1) if controllers else (root / "sys/fs/cgroup", _V2)
        # A container may see its own group at the root of the tree.
        group = tree / path.lstrip("/")
        for folder in (group, *group.parents):
            free = min(free, _left(folder, *names, otherwise=free))
            if folder == tree:
                break
    return max(free, 0)


def host_used_bytes(root: Path = Path("/")) -> int | None:
    """Memory of the machine in use, without the caches that the kernel gives up; None where it does not say."""
    meminfo = root / "proc/meminfo"
    if not meminfo.is_file():
        return None
    facts = _numbers(meminfo)
    return 1024 * (facts["MemTotal:"] - facts["MemAvailable:"])


def _left(folder: Path, limit: str, use: str, spare: str, *, otherwise: int) -> int:
    """What a control group leaves; `otherwise` without a limit."""
    if not (folder / limit).is_file() or not (folder / use).is_file():
        return otherwise
    most = (folder / limit).read_text(encoding="utf-8").strip()
    if most == "max":
        return otherwise
    used = int((folder / use).read_text(encoding="utf-8"))
    return int(most) - used + _numbers(folder / "memory.stat").get(spare, 0)


def _numbers(file: Path) -> dict[str, int]:
    """The first number of each line, by its first word."""
    if not file.is_file():
        return {}
    lines = (line.split() for line in file.read_text(encoding="utf-8").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
