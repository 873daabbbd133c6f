"""Repository of a hub, or folder of a store: the calls that fetching and sending need, and waits with a deadline."""

from __future__ import annotations

import errno
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from strop.utils.background import in_background

T = TypeVar("T")

SILENCE_S = 60.0
"""Time for which a store or a hub may send nothing before a fetch ends, in seconds."""


class Unreachable(Exception):
    """The hub or store did not answer; the message says why."""


class Refused(Exception):
    """The hub or store refused the request; the message says why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """One state of a repository."""

    revision: str
    """Name of this very state: the hash of a commit, or a key made of the store's own words."""
    sizes: Mapping[str, int]
    """Bytes of each of its files."""
    sha256: Mapping[str, str]
    """Of those files whose hash the hub states."""


@dataclass(frozen=True, kw_only=True)
class Sending:
    """Options of sending a folder."""

    say: Callable[[str], object] = lambda line: None
    private: bool = False
    """Make a model that the hub does not have yet one that others do not see."""
    branch: str = ""
    """Of a hub, which must be there; empty: the main one."""
    message: str = "Upload a model with strop"
    """Of the commit, at a hub."""


class Repo(ABC):
    """One model or data set of a hub or a store. Calls may wait; the caller watches `traffic`.

    All calls raise Unreachable where there is no answer, and Refused where the answer is no.
    """

    cache: Path
    """Folder that copies lie in."""
    help: str
    """Advice for a full disk: the way to choose another folder."""
    is_offline = False
    """The user has switched this hub off in the environment."""

    @abstractmethod
    def cached(self, revision: str) -> Path | None:
        """The folder with the copy of a revision as far as it was fetched; None where there is none."""

    @abstractmethod
    def list(self, revision: str) -> Listing:
        """The files of a revision; empty: of the main one."""

    @abstractmethod
    def get(self, listing: Listing, names: Sequence[str]) -> Path:
        """The folder of this state, once these files of it are there; those that are there are not fetched again."""

    @abstractmethod
    def traffic(self) -> int:
        """A number that grows while anything arrives, through whatever process of this machine."""

    @abstractmethod
    def prepare(self, options: Sending) -> None:
        """Check, before a model is made, that it will be accepted."""

    @abstractmethod
    def send(self, folder: Path, options: Sending) -> Listing:
        """Send all files of a folder; the listing of the repository afterwards."""


def run_with_stall_limit(
    work: Callable[[], T], progress: Callable[[], int], silence_s: float = SILENCE_S
) -> T:
    """The result of `work`, run in a thread of its own as long as `progress` grows.

    Clients of stores have deadlines of their own, of minutes or none. A thread that waits for a silent store cannot be
    stopped; it is left behind and does not keep the process alive.

    Args:
        work: the call.
        progress: progress of the call, for example in bytes.
        silence_s: longest time without progress, in seconds.

    Raises:
        TimeoutError: `progress` has not changed for `silence_s` seconds.
    """
    future = in_background(work, name="fetch")
    latest, changed_at = progress(), time.monotonic()
    while not future.done():
        wait([future], min(silence_s / 4, 1.0))
        now = progress()
        if now != latest:
            latest, changed_at = now, time.monotonic()
        elif time.monotonic() - changed_at > silence_s and not future.done():
            raise TimeoutError(f"nothing was received for {silence_s:g} s")
    return future.result()


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder, also while another thread or process writes there."""
    if not path.is_dir():
        with suppress(FileNotFoundError):
            return path.stat().st_size
        return 0
    total = 0
    for file in path.rglob("*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() and not file.is_symlink() else 0
    return total


def is_of_network(error: OSError) -> bool:
    """True where nobody was reached, or nobody knows the name; every other error of the system is one of a disk."""
    return isinstance(error, (ConnectionError, TimeoutError, socket.gaierror)) or error.errno in (
        errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EHOSTDOWN,
    )  # fmt: skip


def reason(error: BaseException) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
