"""Rendezvous of torch.distributed process groups; the runtime that starts the processes hands it to each of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


class Rendezvous(Protocol):
    """Rendezvous that only the processes of one group know; plain data."""

    def join(self, *, timeout_s: float) -> Store:
        """A `torch.distributed` store for the next group of these processes, until its `close()`.

        All of them join their groups in the same order.

        Args:
            timeout_s: deadline of the connection, and of each wait for which torch sets no other.

        Raises:
            ConnectionError: nobody answers there.
        """
        ...
