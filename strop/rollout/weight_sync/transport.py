"""Transports: bytes of buckets from the ranks of the sender to all receivers, in order.

What the bytes mean travels on the channel; both sides know the size of the next bucket before they call. A transport
serves sync after sync until one fails or another receiver joins; then it is closed and another one is made. Every
wait has the channel's deadline and ends with a TimeoutError or ConnectionError that names what it waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import Tensor

from strop.engines.weight_parts import Runs

Pieces = Sequence[Sequence[Runs]]
"""Places in a bucket that each rank of the sender gives, one behind the other; () where all lies together already."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The transport of a sync, as the sender tells its receivers."""

    name: str
    """`cuda_ipc`, `shared_memory`, `store` or `collective`."""
    made_in: int
    """The attempt for which the transport was made: another number means another transport."""
    path: str = ""
    """The file of the shared memory, or the folder of the store."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """Plain JSON by which other processes open the memory of the sender's device (device_slots.py)."""
    slot_bytes: int = 0
    """Size of one slot of the shared memory."""
    port: int = 0
    """Rendezvous of the process groups, at the sender's address."""
    size: int = 0
    """Processes of a group: a rank of the sender and all receivers."""
    num_senders: int = 1
    """Ranks of the sender, each of which sends its pieces of a bucket."""
    device: str = ""
    """Device type the groups work on."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


class SendingTransport(Protocol):
    """The side of a rank of the sender."""

    plan: Plan

    def begin(self) -> None:
        """Get ready for a sync; all receivers do so at the same time."""
        ...

    def send(self, contents: Sequence[Tensor]) -> None:
        """Send this rank's piece of the next bucket to all receivers: one tensor [n] uint8 for each of its places, in
        their order. They may still be read until the third call after this one."""
        ...

    def finish(self) -> None:
        """Wait until everything is on its way without this side."""
        ...

    def close(self) -> None:
        """Give everything back, whatever state the transfer is in."""
        ...


class ReceivingTransport(Protocol):
    """The side of one receiver."""

    plan: Plan

    @property
    def num_ahead(self) -> int:
        """Buckets that may be expected beside the one that is received next, and travel while that one is used."""
        ...

    def begin(self) -> None:
        """Get ready for a sync."""
        ...

    def expect(self, num_bytes: int, pieces: Pieces) -> None:
        """Let the next bucket come. What was received before is no longer valid."""
        ...

    def receive(self) -> Tensor:
        """The first bucket [num_bytes] uint8 of those that are expected, in memory that is valid until the next call of
        any method."""
        ...

    def finish(self) -> None:
        """Everything was read."""
        ...

    def close(self) -> None:
        """Give everything back, whatever state the transfer is in."""
        ...


def put_piece(places: Sequence[Runs], content: Tensor, bucket: Tensor) -> None:
    """Copy a piece [n] uint8 to its places in a bucket."""
    for runs in places:
        runs.put(content[: runs.num_bytes], bucket)
        content = content[runs.num_bytes :]
