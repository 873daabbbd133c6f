"""Devices of a plan: by the names of drivers, and the threads of a process on a CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from strop.trainer.plan.devices import _measured, device_named, this_cpu

MODULE = "strop.trainer.plan.devices"


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


@pytest.mark.parametrize(
    ("is_half", "multiplied"),
    [(True, [torch.bfloat16, torch.float32, torch.bfloat16]), (False, [torch.float32])],
    ids=["with", "without"],
)
def test_products_in_bfloat16_are_measured_as_layers_make_them(
    is_half: bool, multiplied: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without instructions for it, rounded numbers are multiplied in float32; heads of a CPU are always.
    dtypes: list[torch.dtype] = []

    def linear(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        dtypes.append(inputs.dtype)
        return inputs

    monkeypatch.setattr(f"{MODULE}.is_half_faster", lambda: is_half)
    monkeypatch.setattr(f"{MODULE}.linear", linear)
    _measured.__wrapped__(torch.bfloat16, 16, 64, 64, 1)
    assert [dtype for dtype, _ in itertools.groupby(dtypes)] == multiplied


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
