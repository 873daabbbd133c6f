"""A small model with every kind of weight, and syncs between threads of one process.

The threads use the same sockets, process groups and shared memory as processes do; what only processes can show
(shards, kills) is in test_weight_sync_processes.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rollout.shared_host_device import HostDevice
from torch import nn

from strop.rollout.weight_sync.cuda_ipc import DeviceOf, sharing_device
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.sender import WeightSender
from strop.rollout.weight_sync.types import SyncReport

BUCKET_BYTES = 1024
"""The model of `net` takes several such buckets, and its largest tensor is larger than one."""
JOIN_S = 60.0


class Net(nn.Module):
    """Tied embedding and head, odd sizes, three dtypes, a persistent buffer and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 16)
        self.layers = nn.ModuleList(nn.Linear(16, width) for width in (16, 7, 3))
        self.norm = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("angles", torch.zeros(4), persistent=False)
        self.head = nn.Linear(16, 23, bias=False)
        self.head.weight = self.embed.weight


NUM_TENSORS = 10
"""Tensors of `Net`: embedding, six of layers, norm, scale, steps; the head is tied."""


def net(seed: int) -> Net:
    """A model whose values are a function of the seed."""
    model = Net()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*model.parameters(), model.steps):
            tensor.copy_(torch.randint(-99, 99, tensor.shape, generator=generator))
    return model


def bits(model: nn.Module) -> dict[str, bytes]:
    """Every tensor of a model's state, byte by byte."""
    return {
        name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in model.state_dict().items()
    }


def device_of(transport: str) -> DeviceOf:
    """For the side of a sync that is to go by this transport, on a CPU."""
    return HostDevice.of if transport == "cuda_ipc" else sharing_device


@dataclass
class Pair:
    """A sender and its receivers, connected, with their models."""

    sender: WeightSender
    receivers: list[WeightReceiver]
    model: Net
    copies: list[Net]

    def sync(self, version: int, *, expected: Sequence[int] = ()) -> list[SyncReport | BaseException]:
        """What the sender and each receiver returned or raised; receiver i expects `expected[i]` where given."""
        versions = [version, *(expected or [version] * len(self.receivers))]
        calls = [self.sender.send, *(receiver.receive for receiver in self.receivers)]
        return side_by_side([lambda call=call, v=v: call(v) for call, v in zip(calls, versions, strict=True)])

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.sender.close()


def side_by_side(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The calls' results or errors, each call in a thread of its own."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001  (the tests look at it)
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), "a side of the sync hangs"
    return results


def connected(
    *,
    num_receivers: int = 2,
    timeout_s: float = 20.0,
    receiver_timeout_s: float | None = None,
    device_of: DeviceOf = sharing_device,
) -> Iterator[Pair]:
    """A pair in its first state: for a fixture."""
    model, copies = net(1), [net(100 + index) for index in range(num_receivers)]
    sender = WeightSender(model, bucket_bytes=BUCKET_BYTES, timeout_s=timeout_s, device_of=device_of)
    endpoint = sender.open(num_receivers=num_receivers)
    assert endpoint is not None
    receivers = [
        WeightReceiver(ModuleTarget(copy), timeout_s=receiver_timeout_s or timeout_s, device_of=device_of)
        for copy in copies
    ]
    for index, receiver in enumerate(receivers):
        receiver.join(endpoint, index=index)
    pair = Pair(sender, receivers, model, copies)
    try:
        yield pair
    finally:
        pair.close()
