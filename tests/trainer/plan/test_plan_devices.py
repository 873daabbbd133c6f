"""Devices of a plan: by the names of drivers, and the threads of a process on a CPU."""

from __future__ import annotations

import pytest
import torch

from strop.trainer.plan.devices import device_named, this_cpu


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("h100", "H100"),
        ("H100-80GB", "H100"),
        ("rtx4090", "RTX 4090"),
        ("RTX_3090", "RTX 3090"),
    ],
)
def test_devices_are_known_by_the_words_of_their_names(name: str, known: str) -> None:
    assert device_named(name).name == known


@pytest.mark.parametrize(
    "name", ["h1000", "A10G", "NVIDIA GB200", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "abacus"]
)
def test_an_unknown_device_is_an_error_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="is not known: B200"):
        device_named(name)


def test_processes_on_a_cpu_share_its_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        sizes = {"dtype": torch.float32, "rows": 64, "hidden": 64, "inner": 64}
        assert this_cpu(**sizes, processes=2).name == "this CPU, 2 threads"  # type: ignore[arg-type]
        assert this_cpu(**sizes, processes=8).name == "this CPU, 1 thread"  # type: ignore[arg-type]
        assert this_cpu(**sizes, processes=2, num_threads=3).name == "this CPU, 3 threads"  # type: ignore[arg-type]
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
