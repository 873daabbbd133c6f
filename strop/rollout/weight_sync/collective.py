"""Buckets by broadcast: over gloo or NCCL, for receivers on any node.

The sender and its receivers form a process group of their own, made directly from a backend's object, because the
default groups of the two sides are different ones.

With gloo, a bucket is on its way while the sender gathers the next one. With NCCL the sender waits for each bucket,
so that two communicators never compete for one device. The NCCL path has not run on a GPU yet.
"""

from __future__ import annotations

import datetime
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strop.controller.store_server import Rendezvous, RendezvousServer, RendezvousStore
from strop.rollout.weight_sync.channel import ReceiverChannel, SenderChannel
from strop.rollout.weight_sync.transport import Plan
from strop.utils.device import collective_backend
from strop.utils.network_interfaces import keep_to_interface

SENDER = 0
"""Rank of the sender in the group; receiver i is rank i + 1."""
_POLL_S = 0.0005
"""Between two looks at a broadcast that runs on a device."""


class CollectiveSender:
    """The sender's side."""

    def __init__(self, channel: SenderChannel, *, made_in: int, device: torch.device) -> None:
        """`device`: where the group works: the weights' own, or the CPU, through which they then go."""
        self._timeout_s = channel.timeout_s
        # Who has joined the channel knows its secret, so the plan says the port alone.
        self._place = RendezvousServer(channel.host, secret=channel.session)
        self.plan = Plan(
            name="collective",
            made_in=made_in,
            port=self._place.rendezvous.port,
            size=channel.num_receivers + 1,
            device=device.type,
        )
        self._device = device
        self._group: _Group | None = None

    def begin(self) -> None:
        """Form the group, once."""
        if self._group is None:
            self._group = _Group(self._place.rendezvous, self.plan, rank=SENDER, timeout_s=self._timeout_s)

    def send(self, data: Tensor) -> None:
        """Start a broadcast once the one before it is done."""
        self.finish()
        assert self._group is not None, "a sync has begun"
        self._group.start(data.to(self._device))
        if self._device.type != "cpu":
            self.finish()

    def finish(self) -> None:
        """Wait for the broadcast that is under way."""
        assert self._group is not None, "a sync has begun"
        self._group.wait("the receivers to take a bucket")

    def close(self) -> None:
        """Drop the group without the others."""
        if self._group is not None:
            self._group.drop()
        self._group = None
        self._place.close()


class CollectiveReceiver:
    """The side of one receiver."""

    def __init__(self, channel: ReceiverChannel, plan: Plan, *, index: int) -> None:
        self.plan = plan
        self._channel = channel
        self._rank = index + 1
        self._device = torch.device(plan.device)
        self._group: _Group | None = None
        self._buffer = _nothing()

    def begin(self) -> None:
        """Form the group, once."""
        if self._group is None:
            channel, plan = self._channel, self.plan
            rendezvous = Rendezvous(host=channel.host, port=plan.port, secret=channel.session)
            self._group = _Group(rendezvous, plan, rank=self._rank, timeout_s=channel.timeout_s)

    def receive(self, num_bytes: int) -> Tensor:
        """The next bucket, in a buffer that is used again."""
        assert self._group is not None, "a sync has begun"
        if len(self._buffer) < num_bytes:
            self._buffer = _nothing()  # frees the old one first
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        data = self._buffer[:num_bytes]
        self._group.start(data)
        self._group.wait("a bucket from the sender")
        return data

    def finish(self) -> None:
        """Free the buffer: the memory is wanted for generation."""
        self._buffer = _nothing()

    def close(self) -> None:
        """Drop the group without the others."""
        if self._group is not None:
            self._group.drop()
        self._group = None
        self.finish()


class _Group:
    """One rank of the process group."""

    def __init__(self, rendezvous: Rendezvous, plan: Plan, *, rank: int, timeout_s: float) -> None:
        self._device = torch.device(plan.device)
        self._timeout_s = timeout_s
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._under_way: tuple[dist.Work, Tensor] | None = None
        self._store = RendezvousStore(rendezvous, timeout_s=timeout_s)
        try:
            self._backend = _backend(self._store, rank, plan.size, self._device, self._timeout)
        except RuntimeError as error:
            raise ConnectionError(
                f"the {plan.size} processes of the weight sync formed no group within {timeout_s:g} s: "
                f"{_first_sentence(error)}"
            ) from error

    def start(self, data: Tensor) -> None:
        """Start to send or receive bytes [n] uint8 on the group's device."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = SENDER, 0, self._timeout
        try:
            # Kept here only: a reference in the frames of an error would keep the connections open.
            self._under_way = (self._backend.broadcast([data], options), data)
        except RuntimeError as error:
            raise ConnectionError(f"the broadcast of a bucket failed: {_first_sentence(error)}") from error

    def wait(self, waiting_for: str) -> None:
        """Until the broadcast that was started is done, or its deadline; nothing when there is none."""
        deadline = time.monotonic() + self._timeout_s
        if self._under_way is None:
            return
        try:
            if self._device.type != "cpu":
                # `wait` of a device's backend only orders streams.
                while not self._under_way[0].is_completed():
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"waited {self._timeout_s:g} s for {waiting_for}")
                    time.sleep(_POLL_S)
            self._under_way[0].wait()
        except RuntimeError as error:
            raise ConnectionError(
                f"the broadcast broke while waiting for {waiting_for}: {_first_sentence(error)}"
            ) from error
        self._under_way = None

    def drop(self) -> None:
        """End it without the others, whose waits end with it: the connections close with the last reference."""
        self._backend.abort()
        self._under_way = None
        self._backend = None
        self._store.close()


def common_device(devices: list[str]) -> torch.device:
    """Device type of a group of processes on these: theirs, if all are equal and torch can, else the CPU."""
    first = devices[0]
    if all(device == first for device in devices) and _has_backend(collective_backend(first)):
        return torch.device(first)
    return torch.device("cpu")


def _has_backend(backend: str) -> bool:
    return backend == "gloo" or (backend == "nccl" and hasattr(dist, "ProcessGroupNCCL"))


def _backend(
    store: RendezvousStore,
    rank: int,
    size: int,
    device: torch.device,
    timeout: datetime.timedelta,
) -> Any:  # the type information of torch leaves the methods of these classes out
    if collective_backend(device.type) == "nccl":
        keep_to_interface(store.own_host)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    kind: Any = dist.ProcessGroupGloo
    gloo = kind._Options()
    gloo._timeout = timeout
    # Without a name gloo takes the interface that the host's own name resolves to, which may be a public one.
    gloo._devices = [kind.create_device(hostname=store.own_host)]
    return kind(store, rank, size, gloo)


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _first_sentence(error: Exception) -> str:
    return str(error).strip().split("\n")[0].split(". ")[0]
