"""Weights for vLLM in memory of the trainer's device, with host memory in its place and without vLLM."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from rollout.shared_host_device import HostDevice
from rollout.sync_cases import Net, net
from torch import Tensor

from strop.engines.checksum.tensors import digest_tensor
from strop.engines.weights import weights_metadata
from strop.rollout.vllm.target import VllmTarget
from strop.rollout.weight_sync.stream import parameter_stream


class Workers:
    """Answers as inside/server.py does, and keeps what has arrived."""

    def __init__(self, *, reason: str = "") -> None:
        self._reason = reason
        self.asked: list[str] = []
        self.arrived: dict[str, Tensor] = {}
        self.device = HostDevice()

    def ask_now(self, do: str, *, timeout_s: float, **fields: Any) -> Any:
        self.asked.append(do)
        if do == "try_memory":
            return self._reason
        if do == "load":
            self._load(fields["bucket"])
        return None

    def _load(self, bucket: dict[str, Any]) -> None:
        data = (
            self.device.open(bucket["memory"])
            if "memory" in bucket
            else torch.from_file(bucket["paths"][0], size=bucket["num_bytes"], dtype=torch.uint8)
        ).clone()
        for name, shape, dtype, offset, digest in bucket["entries"]:
            kind = getattr(torch, dtype)
            value = data[offset : offset + torch.Size(shape).numel() * kind.itemsize].view(kind).view(shape)
            assert digest_tensor(value) == digest
            self.arrived[name] = value


def written(model: Net, target: VllmTarget) -> None:
    for bucket in parameter_stream(model, bucket_bytes=1024):
        target.load([(weight.name, tensor) for weight, tensor in bucket.tensors()])


def check(model: Net, workers: Workers) -> None:
    state = model.state_dict()
    assert set(workers.arrived) == {weight.name for weight in weights_metadata(model)}
    assert all(torch.equal(value, state[name]) for name, value in workers.arrived.items())


def test_buckets_stay_on_the_device_that_vllms_workers_open() -> None:
    model, workers, device = net(1), Workers(), HostDevice()
    target = VllmTarget(workers, weights_metadata(model), device_of=lambda _: device)  # type: ignore[arg-type]
    written(model, target)
    check(model, workers)
    assert workers.asked[:3] == ["begin_update", "try_memory", "load"]
    assert workers.asked.count("try_memory") == 1
    assert workers.device.opened == workers.asked.count("load") > 3
    assert device.num_exported == 0, "each bucket is given back"
    assert target.digests(["norm"]) == {"norm": digest_tensor(model.norm)}


class Full(HostDevice):
    """No room but for the trial."""

    def allocate(self, num_bytes: int) -> Tensor:
        if num_bytes > 64:
            raise OSError(f"no room for {num_bytes} bytes")
        return super().allocate(num_bytes)


@pytest.mark.parametrize(
    ("device", "refusal", "reason"),
    [
        (HostDevice(), "no peer access", "vLLM's worker: no peer access"),
        (Full(), "", "no room for 152 bytes"),  # norm, scale and steps end at 10, 72 and 152
    ],
)
def test_what_the_workers_cannot_open_is_said_once_and_host_memory_serves(
    device: HostDevice, refusal: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, workers = net(1), Workers(reason=refusal)
    target = VllmTarget(workers, weights_metadata(model), device_of=lambda _: device)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        written(model, target)
        written(model, target)
    check(model, workers)
    assert caplog.messages == [
        f"weights go to vLLM through host memory, not through memory of the device: {reason}"
    ]
    assert workers.device.opened == device.num_exported == 0
