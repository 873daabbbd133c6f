"""Where the processes of a group find each other: the runtime that starts them hands it to each of them."""

from __future__ import annotations

from typing import Any, Protocol


class Meeting(Protocol):
    """A place that the processes of one group know, and nobody else; plain data."""

    def join(self, *, timeout_s: float) -> Any:
        """A `torch.distributed` store for the next group of these processes, until its `close()`.

        All of them join their groups in the same order.

        Args:
            timeout_s: deadline of the connection, and of each wait for which torch sets no other.

        Raises:
            ConnectionError: nobody answers there.
        """
        ...
