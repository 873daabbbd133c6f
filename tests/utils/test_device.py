from __future__ import annotations

import pytest
import torch

from strop.utils.device import collective_backend, device_name, num_devices, visibility_variable


def test_each_kind_of_device_has_its_backend_and_variable() -> None:
    assert [collective_backend(name) for name in ("cuda:1", "npu", "cpu")] == ["nccl", "hccl", "gloo"]
    assert visibility_variable("cuda") == "CUDA_VISIBLE_DEVICES"
    assert visibility_variable("cpu") is None


def test_devices_of_amd_have_their_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert collective_backend("cuda") == "nccl"
    assert visibility_variable("cuda") == "HIP_VISIBLE_DEVICES"
    assert visibility_variable("cpu") is None


def test_auto_takes_an_accelerator_only_where_torch_has_one() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert device_name() == expected
    assert device_name("cpu") == "cpu"
    assert num_devices("cpu") == 1


def test_an_absent_or_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match="unknown device 'tpu'; known: cuda, npu, cpu"):
        device_name("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="'cuda' was asked for, but torch finds none"):
            device_name("cuda")
