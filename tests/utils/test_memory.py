"""How much memory is free: the least of what the machine and each control group around the process leave."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from strop.utils.machine_limits import device_bytes, free_bytes, host_free_bytes


def machine(root: Path, files: dict[str, str]) -> Path:
    """A tree of proc and sys with 1,000 KiB free."""
    for name, text in {"proc/meminfo": "MemTotal: 2000 kB\nMemAvailable: 1000 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def group(folder: str, limit: str, used: int, spare: int) -> dict[str, str]:
    """A control group of the second kind."""
    return {
        f"sys/fs/cgroup/{folder}memory.max": f"{limit}\n",
        f"sys/fs/cgroup/{folder}memory.current": f"{used}\n",
        f"sys/fs/cgroup/{folder}memory.stat": f"anon 5\ninactive_file {spare}\n",
    }


def test_this_machine() -> None:
    assert free_bytes(torch.device("cpu")) == pytest.approx(psutil.virtual_memory().available, rel=0.2)


@pytest.mark.parametrize(
    ("limit", "used", "free"), [("max", 0, 1000 * 1024), ("500000", 300000, 210000), ("500000", 600000, 0)]
)
def test_a_group_around_the_process_counts(tmp_path: Path, limit: str, used: int, free: int) -> None:
    files = {"proc/self/cgroup": "0::/jobs/one\n", **group("jobs/", limit, used, 10000)}
    files |= group("jobs/one/", "max", 100, 0)
    assert host_free_bytes(machine(tmp_path, files)) == free


def test_a_container_sees_its_group_at_the_root(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/docker/abc\n", **group("", "400000", 100000, 0)}
    assert host_free_bytes(machine(tmp_path, files)) == 300000


def test_a_tree_per_controller(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/jobs"
    files = {
        "proc/self/cgroup": "9:cpu,cpuacct:/jobs\n4:memory:/jobs\n0::/\n",
        f"{folder}/memory.limit_in_bytes": "700000\n",
        f"{folder}/memory.usage_in_bytes": "650000\n",
        f"{folder}/memory.stat": "inactive_file 1\ntotal_inactive_file 30000\n",
    }
    assert host_free_bytes(machine(tmp_path, files)) == 80000


@pytest.mark.parametrize(
    ("share", "free", "expected"),
    [(1.0, 50, (100, 60)), (1.0, 5, (100, 15)), (0.5, 50, (50, 30)), (0.25, 50, (25, 10))],
)
def test_of_a_device_counts_what_torch_may_take(
    monkeypatch: pytest.MonkeyPatch, share: float, free: int, expected: tuple[int, int]
) -> None:
    """100 bytes, of which torch holds 30 and uses 20."""
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda _: (free, 100))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 30)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda _: 20)
    monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", lambda _: share, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for device in (torch.device("cuda"), torch.device("cuda", 1)):
        assert (device_bytes(device), free_bytes(device)) == expected
