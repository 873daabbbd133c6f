"""Buckets by broadcast: over gloo or NCCL, for receivers on any node.

Each rank of the sender and all receivers form a process group, over which the rank sends its pieces of every bucket:
with its first piece, so that a rank that holds what others give has none.

A piece is a number of broadcasts: what is large goes by itself, out of the memory where it lies and, where it is one
run, into its place in the bucket; what is small is joined (`messages`).

With gloo, the pieces of two buckets are on their way at the same time, while the sender fills the next ones and the
receivers load the one before: they expect buckets before they use that. With NCCL pieces come one after the other,
and each rank waits for its own, so that two communicators never compete for one device. The NCCL path has not run on a
GPU yet.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from strop.controller.store_server import Rendezvous, RendezvousServer, RendezvousStore
from strop.engines.weight_parts import Runs
from strop.rollout.weight_sync.broadcast_group import SENDER, BroadcastGroup
from strop.rollout.weight_sync.channel import ReceiverChannel, SenderChannel
from strop.rollout.weight_sync.stream import BUCKET_BYTES
from strop.rollout.weight_sync.transport import Pieces, Plan, put_piece

PLAN_NAME = "collective"
MAX_HOST_BUCKET_BYTES = 8 << 20
"""Limit of a bucket in host memory: while the first one is filled nothing travels, nor while the last one is loaded,
and a receiver touches memory of three that is new in each sync."""
_ON_THE_WAY = 2
"""Pieces of a rank, and buckets of a receiver, that travel at a time: the network goes on while a process waits for its
turn on a busy processor."""
_MESSAGE_BYTES = 1 << 20
"""Contents of so many bytes are a broadcast of their own."""


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
        self._group: BroadcastGroup | None = None
        self._staging = deque(_Memory(self._device) for _ in range(1 + _num_on_the_way(self._device)))
        """For what is joined: of the next piece first, then of those that are on their way."""
        self._sent: deque[int] = deque()
        """Broadcasts of each piece that is on its way."""

    @property
    def max_bucket_bytes(self) -> int:
        """In host memory few bytes, so that a bucket is filled, and another one loaded, while others travel."""
        return _max_bucket_bytes(self._device)

    def begin(self) -> None:
        """Go where the processes meet, once."""
        if self._store is None:
            self._store = RendezvousStore(self._rendezvous, timeout_s=self._timeout_s)

    @property
    def needs_room(self) -> bool:
        """No: `send` waits for the piece before."""
        return False

    def wait_for_room(self) -> None:
        """Nothing to do."""

    def send(self, contents: Sequence[Tensor]) -> None:
        """Start the broadcasts of a piece once there is at most one before it; the first one forms the group."""
        sizes = [len(content) for content in contents]
        cuts = messages(sizes)
        self._staging.rotate()
        room = self._staging[0].taken([sum(sizes[cut]) for cut in cuts if _is_joined(sizes[cut])])
        ready = [
            _joined(contents[cut], room) if _is_joined(sizes[cut]) else contents[cut.start] for cut in cuts
        ]
        while len(self._sent) >= _ON_THE_WAY:
            self._wait(self._sent.popleft())
        if ready and self._group is None:
            assert self._store is not None, "a sync has begun"
            self._group = BroadcastGroup(
                self._store, self.plan, sender=self._rank, rank=SENDER, timeout_s=self._timeout_s
            )
        for data in ready:
            assert self._group is not None, "there is something to send"
            self._group.start(data.to(self._device))
            if self._device.type != "cpu":
                self._wait(1)
        self._sent.append(len(ready) if self._device.type == "cpu" else 0)

    def finish(self) -> None:
        """Wait for the broadcasts that are under way, and free the memory: it is wanted for training."""
        while self._sent:
            self._wait(self._sent.popleft())
        self._free()

    def _wait(self, count: int) -> None:
        """Wait for so many broadcasts."""
        if self._group is not None:
            self._group.wait("the receivers to take a bucket", count=count)

    def _free(self) -> None:
        for memory in self._staging:
            memory.clear()

    def close(self) -> None:
        """Drop the group without the others."""
        if self._group is not None:
            self._group.drop()
            self._group = None
        self._sent.clear()
        self._free()
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
        self._groups: dict[int, BroadcastGroup] = {}
        """By the rank that sends."""
        self._memory = deque(
            (_Memory(self._device), _Memory(self._device)) for _ in range(1 + self.num_ahead)
        )
        """For a bucket, and for what arrives beside it: of the next one first, then of those before it."""
        self._expected: deque[_Expected] = deque()

    @property
    def num_ahead(self) -> int:
        """On a device each bucket comes by itself."""
        return _num_on_the_way(self._device)

    def begin(self) -> None:
        """Go where the processes meet, once."""
        if self._store is None:
            channel = self._channel
            place = Rendezvous(host=channel.host, port=self.plan.port, secret=channel.session)
            self._store = RendezvousStore(place, timeout_s=channel.timeout_s)

    def expect(self, num_bytes: int, pieces: Pieces) -> None:
        """Start the broadcasts of a bucket. What is one run arrives in its place."""
        if len(pieces) > self.plan.num_senders:
            raise ConnectionError(f"pieces of {len(pieces)} ranks, and {self.plan.num_senders} send")
        cuts = [
            (rank, piece[cut])
            for rank, piece in enumerate(pieces)
            for cut in messages([runs.num_bytes for runs in piece])
        ]
        self._memory.rotate()
        memory, beside = self._memory[0]
        (bucket,) = memory.taken([num_bytes])
        coming = _Expected(bucket)
        self._expected.append(coming)
        room = beside.taken([_num_bytes(places) for _, places in cuts if not _is_one_run(places)])
        for rank, places in cuts:
            if _is_one_run(places):
                data = bucket[places[0].first : places[0].stop]
            else:
                data = next(room)
                coming.beside.append((places, data))
            self._group(rank).start(data)
            if self._device.type == "cpu":
                coming.num_messages[rank] += 1
            else:
                self._group(rank).wait(_piece_of(rank))

    def receive(self) -> Tensor:
        """The bucket that was expected first, once all of it is there."""
        coming = self._expected.popleft()
        for rank, count in coming.num_messages.items():
            self._groups[rank].wait(_piece_of(rank), count=count)
        for places, content in coming.beside:
            put_piece(places, content, coming.bucket)
        return coming.bucket

    def finish(self) -> None:
        """Free the memory: it is wanted for generation."""
        self._expected.clear()
        for pair in self._memory:
            for memory in pair:
                memory.clear()

    def close(self) -> None:
        """Drop the groups without the others."""
        for group in self._groups.values():
            group.drop()
        self._groups = {}
        if self._store is not None:
            self._store.close()
            self._store = None
        self.finish()

    def _group(self, sender: int) -> BroadcastGroup:
        """The group of a rank that sends; the first piece of it forms it, which all receivers do in the same order."""
        if sender not in self._groups:
            assert self._store is not None, "a sync has begun"
            self._groups[sender] = BroadcastGroup(
                self._store, self.plan, sender=sender, rank=self._rank, timeout_s=self._channel.timeout_s
            )
        return self._groups[sender]


@dataclass
class _Expected:
    """A bucket on its way."""

    bucket: Tensor
    beside: list[tuple[Sequence[Runs], Tensor]] = field(default_factory=list)
    """Contents that arrive beside it, with their places in it."""
    num_messages: Counter[int] = field(default_factory=Counter)
    """Broadcasts of each rank of the sender that it waits for."""


class _Memory:
    """Memory that is used again, and replaced where more is wanted."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._data = torch.empty(0, dtype=torch.uint8)

    def taken(self, sizes: Sequence[int]) -> Iterator[Tensor]:
        """[n] uint8 of each of these sizes, one behind the other."""
        if len(self._data) < sum(sizes):
            self.clear()  # frees it before there is another one
            self._data = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        return iter(torch.split(self._data[: sum(sizes)], list(sizes)))

    def clear(self) -> None:
        """Give it back."""
        self._data = torch.empty(0, dtype=torch.uint8)


def messages(sizes: Sequence[int]) -> list[slice]:
    """Broadcasts of contents of these sizes [n] bytes: what is large goes by itself, neighbours that are small go
    together. Both sides come to the same answer."""
    cuts: list[slice] = []
    for index, size in enumerate(sizes):
        if cuts and max(size, sizes[index - 1]) < _MESSAGE_BYTES:
            cuts[-1] = slice(cuts[-1].start, index + 1)
        else:
            cuts.append(slice(index, index + 1))
    return cuts


def max_held_bytes(device: torch.device) -> int:
    """Most that a rank of the sender, or a receiver, holds of buckets and of what is joined or arrives beside them,
    where the groups work on this device."""
    return 2 * (1 + _num_on_the_way(device)) * _max_bucket_bytes(device)


def _max_bucket_bytes(device: torch.device) -> int:
    return MAX_HOST_BUCKET_BYTES if device.type == "cpu" else BUCKET_BYTES


def _num_on_the_way(device: torch.device) -> int:
    """Buckets that travel while the process does something else."""
    return _ON_THE_WAY if device.type == "cpu" else 0


def _is_joined(sizes: Sequence[int]) -> bool:
    return len(sizes) > 1


def _joined(contents: Sequence[Tensor], room: Iterator[Tensor]) -> Tensor:
    """Contents one behind the other, in the next room."""
    data, at = next(room), 0
    for content in contents:
        data[at : at + len(content)].copy_(content)
        at += len(content)
    return data


def _is_one_run(places: Sequence[Runs]) -> bool:
    return len(places) == 1 and places[0].count == 1


def _num_bytes(places: Sequence[Runs]) -> int:
    return sum(runs.num_bytes for runs in places)


def _piece_of(sender: int) -> str:
    return f"a piece of a bucket from rank {sender} of the actor"
