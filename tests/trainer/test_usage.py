"""Utilization and memory of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_runs import Done

from strop.engines.flops.peak import half_precision_peak, peak_flops
from strop.engines.flops.usage import Usage, host_used_bytes, usage_metrics
from strop.engines.tokens import TokenCounts


def usage(**given: Any) -> Usage:
    known = {
        "updates": 6e9, "others": 2e9, "peak": 1e10, "allocated": None, "reserved": None, "host": 2**30,
        "tokens": TokenCounts(),
    }  # fmt: skip
    return Usage(**{**known, **given})


def test_shares_by_hand() -> None:
    ranks = [
        usage(host=2**30, allocated=2**31, reserved=2**32, tokens=TokenCounts(of_rows=10, computed=4)),
        usage(updates=2e9, peak=3e10, allocated=2**30, tokens=TokenCounts(of_rows=30, computed=26)),
    ]
    found = usage_metrics(
        {"actor": ranks}, {"update_actor": 2.0, "old_log_prob": 0.5, "ref": 9.0}, actor_is_reference=False
    )
    assert found == {
        "perf/mfu/actor": pytest.approx(8e9 / (2 * 4e10)),
        "perf/mfu/actor_infer": pytest.approx(4e9 / (0.5 * 4e10)),
        "perf/shared_tokens/actor": pytest.approx(0.25),  # 10 of 40
        "perf/max_memory_allocated_gb": 2.0,
        "perf/max_memory_reserved_gb": 4.0,
        "perf/cpu_memory_used_gb": 1.0,
    }


@pytest.mark.parametrize(
    ("given", "seconds"),
    [({"updates": None}, 1.0), ({"peak": None}, 1.0), ({}, 0.0)],
    ids=["model", "device", "time"],
)
def test_what_is_not_known_is_not_said(given: dict[str, Any], seconds: float) -> None:
    found = usage_metrics({"actor": [usage(**given)]}, {"update_actor": seconds}, actor_is_reference=True)
    assert not any("mfu" in name for name in found)


def test_peaks_of_devices_by_name() -> None:
    assert half_precision_peak("NVIDIA H100 PCIe") == 756e12
    assert half_precision_peak("NVIDIA H100 80GB HBM3") == 989e12
    assert half_precision_peak("NVIDIA H200") == 989e12
    assert half_precision_peak("NVIDIA H20") == 148e12
    assert half_precision_peak("NVIDIA L40S") == 362e12
    assert half_precision_peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert half_precision_peak("NVIDIA H200 NVL") == 835e12


@pytest.mark.parametrize(
    "name",
    [
        "Somebody's first chip", "NVIDIA RTX A4000", "NVIDIA A10G", "NVIDIA RTX A1000",
        "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ],
)  # fmt: skip
def test_a_device_that_only_has_a_known_name_in_its_own_is_not_known(name: str) -> None:
    assert half_precision_peak(name) is None


def test_the_peak_of_a_cpu_is_measured() -> None:
    found = peak_flops(torch.device("cpu"), torch.float32)
    assert found is not None
    assert 1e8 < found < 1e14


def test_a_run_has_them_in_every_step(on_policy: Done) -> None:
    used = host_used_bytes()
    assert used is not None
    for step in on_policy.steps:
        assert 0 < step["perf/mfu/actor"] < 1.5, "a tiny model: far from the peak, which was measured alone"
        assert 0 < step["perf/cpu_memory_used_gb"] < 4 * used / 2**30
        assert "perf/max_memory_allocated_gb" not in step
