"""Buckets by broadcast: over gloo or NCCL, for receivers on any node.

Each rank of the sender and all receivers form a process group, over which the rank sends its pieces of every bucket:
with its first piece, so that a rank that holds what others give has none. The groups are made directly from a backend's
object, because the default groups of the two sides are different ones.

With gloo, the pieces of a bucket are on their way at the same time, while the sender fills the next ones. With NCCL
they come one after the other, and each rank waits for its own, so that two communicators never compete for one device.
The NCCL path has not run on a GPU yet.
"""

from __future__ import annotations

import datetime
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from strop.controller.store_server import Rendezvous, RendezvousServer, RendezvousStore
from strop.engines.weight_parts import Runs
from strop.rollout.weight_sync.channel import ReceiverChannel, SenderChannel
from strop.rollout.weight_sync.transport import Pieces, Plan, put_piece
from strop.utils.device import collective_backend
from strop.utils.network_interfaces import keep_to_interface

PLAN_NAME = "collective"
SENDER = 0
"""Rank of the sender in its group; receiver i is rank i + 1."""
_POLL_S = 0.0005
"""Between two looks at a broadcast that runs on a device."""


class CollectiveSender:
    """The side of one rank of the sender."""

    def __init__(
        self, plan: Plan, *, rank: int, host: str, secret: str, timeout_s: float,
        server: RendezvousServer | None = None,
    ) -> None:  # fmt: skip
        """Nothing is connected yet.

        Args:
            plan: as rank 0 has made it.
            rank: of the sender.
            host, secret: of the session.
            timeout_s: limit of each wait, in seconds.
            server: at which the processes meet, on rank 0.
        """
        self.plan = plan
        self._rank, self._timeout_s, self._server = rank, timeout_s, server
        self._rendezvous = Rendezvous(host=host, port=plan.port, secret=secret)
        self._device = torch.device(plan.device)
        self._store: RendezvousStore | None = None
        self._group: _Group | None = None

    def begin(self) -> None:
        """Go where the processes meet, once."""
        if self._store is None:
            self._store = RendezvousStore(self._rendezvous, timeout_s=self._timeout_s)

    def wait_for_room(self) -> None:
        """Nothing to do: `send` waits for the piece before."""

    def send(self, data: Tensor) -> None:
        """Start a broadcast once the one before it is done; the first one forms the group."""
        self.finish()
        if not len(data):
            return
        if self._group is None:
            assert self._store is not None, "a sync has begun"
            self._group = _Group(
                self._store, self.plan, sender=self._rank, rank=SENDER, timeout_s=self._timeout_s
            )
        self._group.start(data.to(self._device))
        if self._device.type != "cpu":
            self.finish()

    def finish(self) -> None:
        """Wait for the broadcast that is under way."""
        if self._group is not None:
            self._group.wait("the receivers to take a bucket")

    def close(self) -> None:
        """Drop the group without the others."""
        if self._group is not None:
            self._group.drop()
            self._group = None
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._server is not None:
            self._server.close()


def collective_sender(
    channel: SenderChannel, *, made_in: int, device: torch.device, num_senders: int
) -> CollectiveSender:
    """The side of rank 0, where the others meet the receivers.

    `device`: where the groups work: the weights' own, or the CPU, through which they then go.
    """
    # Who has joined the channel knows its secret, so the plan says the port alone.
    server = RendezvousServer(channel.host, secret=channel.session)
    plan = Plan(
        name=PLAN_NAME, made_in=made_in, port=server.rendezvous.port, size=channel.num_receivers + 1,
        num_senders=num_senders, device=device.type,
    )  # fmt: skip
    return CollectiveSender(
        plan, rank=0, host=channel.host, secret=channel.session, timeout_s=channel.timeout_s, server=server
    )


class CollectiveReceiver:
    """The side of one receiver."""

    def __init__(self, channel: ReceiverChannel, plan: Plan, *, index: int) -> None:
        self.plan = plan
        self._channel = channel
        self._rank = index + 1
        self._device = torch.device(plan.device)
        self._store: RendezvousStore | None = None
        self._groups: dict[int, _Group] = {}
        """By the rank that sends."""
        self._bucket, self._beside = _nothing(), _nothing()

    def begin(self) -> None:
        """Go where the processes meet, once."""
        if self._store is None:
            channel = self._channel
            place = Rendezvous(host=channel.host, port=self.plan.port, secret=channel.session)
            self._store = RendezvousStore(place, timeout_s=channel.timeout_s)

    def receive(self, num_bytes: int, pieces: Pieces) -> Tensor:
        """The next bucket, in a buffer that is used again. A piece that is one run arrives in its place."""
        if len(pieces) > self.plan.num_senders:
            raise ConnectionError(f"pieces of {len(pieces)} ranks, and {self.plan.num_senders} send")
        if len(self._bucket) < num_bytes:
            self._bucket = _nothing()  # frees it before there is another one
            self._bucket = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        bucket, whole = self._bucket[:num_bytes], [[Runs(first=0, stride=0, count=1, length=num_bytes)]]
        places = list(pieces or (whole if num_bytes else []))
        sizes = [sum(runs.num_bytes for runs in piece) for piece in places]
        scattered = [
            index for index, piece in enumerate(places) if len(piece) > 1 or any(r.count > 1 for r in piece)
        ]
        if len(self._beside) < (size := sum(sizes[index] for index in scattered)):
            self._beside = _nothing()
            self._beside = torch.empty(size, dtype=torch.uint8, device=self._device)
        contents, at = {}, 0
        for index in scattered:
            contents[index] = self._beside[at : at + sizes[index]]
            at += sizes[index]
        for index, piece in enumerate(places):
            if sizes[index]:
                direct = bucket[piece[0].first : piece[0].first + sizes[index]]
                self._group(index).start(contents.get(index, direct))
                if self._device.type != "cpu":
                    self._group(index).wait(_piece_of(index))
        for index, group in self._groups.items():
            group.wait(_piece_of(index))
        for index, content in contents.items():
            put_piece(places[index], content, bucket)
        return bucket

    def finish(self) -> None:
        """Free the buffers: the memory is wanted for generation."""
        self._bucket = self._beside = _nothing()

    def close(self) -> None:
        """Drop the groups without the others."""
        for group in self._groups.values():
            group.drop()
        self._groups = {}
        if self._store is not None:
            self._store.close()
            self._store = None
        self.finish()

    def _group(self, sender: int) -> _Group:
        """The group of a rank that sends; the first piece of it forms it, which all receivers do in the same order."""
        if sender not in self._groups:
            assert self._store is not None, "a sync has begun"
            self._groups[sender] = _Group(
                self._store, self.plan, sender=sender, rank=self._rank, timeout_s=self._channel.timeout_s
            )
        return self._groups[sender]


class _Group:
    """One rank of the process group."""

    def __init__(
        self, store: RendezvousStore, plan: Plan, *, sender: int, rank: int, timeout_s: float
    ) -> None:
        """`sender`: rank of the actor that sends over it."""
        self._device = torch.device(plan.device)
        self._timeout_s = timeout_s
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._under_way: tuple[dist.Work, Tensor] | None = None
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


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _piece_of(sender: int) -> str:
    return f"a piece of a bucket from rank {sender} of the actor"


def _first_sentence(error: Exception) -> str:
    return str(error).strip().split("\n")[0].split(". ")[0]
