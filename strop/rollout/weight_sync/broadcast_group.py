"""Process group of one rank of the sender and all receivers, over which the rank sends: over gloo or NCCL.

It is made directly from a backend's object, because the default groups of the two sides are different ones.
"""

from __future__ import annotations

import datetime
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from strop.controller.store_server import RendezvousStore
from strop.rollout.weight_sync.transport import Plan
from strop.utils.device import collective_backend
from strop.utils.network_interfaces import keep_to_interface

SENDER = 0
"""Rank of the sender in its group; receiver i is rank i + 1."""
_POLL_S = 0.0005
"""Between two looks at a broadcast that runs on a device."""


class BroadcastGroup:
    """One rank of the process group."""

    def __init__(
        self, store: RendezvousStore, plan: Plan, *, sender: int, rank: int, timeout_s: float
    ) -> None:
        """`sender`: rank of the actor that sends over it."""
        self._device = torch.device(plan.device)
        self._timeout_s = timeout_s
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._under_way: deque[tuple[dist.Work, Tensor]] = deque()
        try:
            self._backend = _backend(store, sender, rank, plan.size, self._device, self._timeout)
        except RuntimeError as error:
            raise ConnectionError(
                f"rank {sender} of the actor and {plan.size - 1} receivers of the weight sync formed no group within "
                f"{timeout_s:g} s: {_first_sentence(error)}"
            ) from error

    def start(self, data: Tensor) -> None:
        """Start to send or receive bytes [n] uint8 on the group's device."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = SENDER, 0, self._timeout
        try:
            # Kept here only: a reference in the frames of an error would keep the connections open.
            self._under_way.append((self._backend.broadcast([data], options), data))
        except RuntimeError as error:
            raise ConnectionError(f"the broadcast of a bucket failed: {_first_sentence(error)}") from error

    def wait(self, waiting_for: str, *, count: int = 1) -> None:
        """Until so many of the broadcasts that were started are done, or their deadline."""
        deadline = time.monotonic() + self._timeout_s
        for _ in range(count):
            try:
                if self._device.type != "cpu":
                    # `wait` of a device's backend only orders streams.
                    while not self._under_way[0][0].is_completed():
                        if time.monotonic() > deadline:
                            raise TimeoutError(f"waited {self._timeout_s:g} s for {waiting_for}")
                        time.sleep(_POLL_S)
                self._under_way[0][0].wait()
            except RuntimeError as error:
                raise ConnectionError(
                    f"the broadcast broke while waiting for {waiting_for}: {_first_sentence(error)}"
                ) from error
            self._under_way.popleft()

    def drop(self) -> None:
        """End it without the others, whose waits end with it: the connections close with the last reference."""
        self._backend.abort()
        self._under_way.clear()
        self._backend = None


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
    sender: int,
    rank: int,
    size: int,
    device: torch.device,
    timeout: datetime.timedelta,
) -> Any:  # the type information of torch leaves the methods of these classes out
    keys = PrefixStore(f"sender {sender}", store)  # of each group apart
    if collective_backend(device.type) == "nccl":
        keep_to_interface(store.own_host)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(keys, rank, size, options)
    kind: Any = dist.ProcessGroupGloo
    gloo = kind._Options()
    gloo._timeout = timeout
    # Without a name gloo takes the interface that the host's own name resolves to, which may be a public one.
    gloo._devices = [kind.create_device(hostname=store.own_host)]
    return kind(keys, rank, size, gloo)


def _first_sentence(error: Exception) -> str:
    return str(error).strip().split("\n")[0].split(". ")[0]
