"""Transports: bytes of buckets from one sender to all receivers, in order.

What the bytes mean travels on the channel; both sides know the size of the next bucket before they call. A transport
serves sync after sync until one fails or another receiver joins; then it is closed and another one is made. Every
wait has the channel's deadline and ends with a TimeoutError or ConnectionError that names what it waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import Tensor


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
    """Rendezvous of the process group, at the sender's address."""
    size: int = 0
    """Processes of the group."""
    device: str = ""
    """Device type the group works on."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


class SendingTransport(Protocol):
    """The sender's side."""

    plan: Plan

    def begin(self) -> None:
        """Get ready for a sync; all receivers do so at the same time."""
        ...

    def send(self, data: Tensor) -> None:
        """Send bytes [n] uint8 to all receivers. They may still be read until the next call of any method."""
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

    def begin(self) -> None:
        """Get ready for a sync."""
        ...

    def receive(self, num_bytes: int) -> Tensor:
        """The next bucket [num_bytes] uint8, in memory that is valid until the next call of any method."""
        ...

    def finish(self) -> None:
        """Everything was read."""
        ...

    def close(self) -> None:
        """Give everything back, whatever state the transfer is in."""
        ...
