"""How many CPU cores this process may use."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path, PurePosixPath


def usable_cores(*, root: Path = Path("/")) -> int:
    """Cores that this process may be scheduled on, within the CPU quota of its control groups; at least 1.

    A container may show 64 cores and give the time of two: more threads than that are stopped in turn, and those that
    run wait for them. A quota of part of a core is rounded down.

    Args:
        root: where `proc` and `sys` are.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(min([cores, *(int(quota) for quota in _quotas(root))]), 1)


def _quotas(root: Path) -> list[float]:
    """Cores' worth of time that each control group above this process allows; none where nothing limits it."""
    groups = []
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="ascii", errors="replace").splitlines():
            # The number of a tree, its controllers, the group in it.
            _, controllers, group = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                groups.append((controllers, PurePosixPath(group)))
    found = []
    for controllers, path in groups:
        mount = root / "sys/fs/cgroup" / controllers  # of the second version, controllers is empty
        for part in (path, *path.parents):
            folder = mount / part.relative_to("/")
            with contextlib.suppress(OSError, ValueError):  # no such file; `max`
                if controllers:
                    quota = int((folder / "cpu.cfs_quota_us").read_text())
                    period = int((folder / "cpu.cfs_period_us").read_text())
                else:
                    quota, period = map(int, (folder / "cpu.max").read_text().split())
                if quota > 0:
                    found.append(quota / period)
    return found
