"""What a hub or a store is asked for, whichever it is."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Unreachable(Exception):
    """The hub or store did not answer; the message says how."""


def is_of_network(error: OSError) -> bool:
    """Nobody was reached, or nobody knows the name; no other error of the system is one of a disk."""
    return isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)) or error.errno in (
        errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EHOSTDOWN,
    )  # fmt: skip


class Refused(Exception):
    """It answered that it will not give this model; the message says why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """One state of a model."""

    revision: str
    """What names this very state: the hash of a commit, or a key made of the store's own words."""
    sizes: Mapping[str, int]
    """Bytes of each of its files."""
    sha256: Mapping[str, str]
    """Of those files whose hash the hub states."""


class Remote(Protocol):
    """One model of a hub or a store. Calls may wait; the caller watches `traffic`."""

    cache: Path
    """The folder that copies lie in."""
    help: str
    """How that folder is chosen, for a disk that is full."""

    def cached(self, revision: str) -> Path | None:
        """The folder with the copy of a revision as far as it was fetched; None where there is none."""
        ...

    def list(self, revision: str) -> Listing:
        """What there is.

        Raises:
            Unreachable, Refused: there is no answer, or no such model or revision.
        """
        ...

    def get(self, listing: Listing, name: str) -> Path:
        """Fetch one file unless it is there; its path.

        Raises:
            Unreachable, Refused: it cannot be had.
        """
        ...

    def finish(self, listing: Listing) -> Path:
        """The folder, once every file was fetched."""
        ...

    def traffic(self) -> int:
        """A number that grows while anything arrives, through whatever process of this machine."""
        ...
