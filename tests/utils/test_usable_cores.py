"""The cores that a process may use, in file trees as the kernel shows them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strop.utils.machine_limits import usable_cores

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {"cpu.max": "100000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, CORES),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "100000000 100000"}, CORES),
        # The tightest of the groups above the process counts.
        ("0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1),
        ("0::/a/b", {"other/cpu.max": "100000 100000"}, CORES),
        # The first version has a tree per controller, and -1 for no limit.
        (
            "5:memory:/a\n4:cpu,cpuacct:/a",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "100000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            1,
        ),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, CORES),
        ("", {}, CORES),
    ],
)
def test_a_quota_of_a_control_group_is_respected(
    groups: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    for name, content in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{k}": v for k, v in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n", encoding="ascii")
    assert usable_cores(root=tmp_path) == expected


def test_without_control_groups_it_is_the_cores_that_the_process_may_run_on(tmp_path: Path) -> None:
    assert usable_cores(root=tmp_path) == CORES
