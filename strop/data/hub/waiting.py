"""Waits that last as long as something arrives, and what a fetch needs of this machine: its turn, and room."""

from __future__ import annotations

import errno
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from strop.data.hub.remote import Remote
from strop.utils.background import in_background

T = TypeVar("T")

_MEBIBYTE = 1 << 20
_ROOM = 64 * _MEBIBYTE
"""Left free on the disk beside what is fetched, in bytes."""
SILENCE_S = 60.0
"""How long a store or a hub may send nothing before a fetch ends, in seconds."""


def while_heard(
    work: Callable[[], T],
    progress: Callable[[], int],
    silence_s: float = SILENCE_S,
    *,
    show: Callable[[int], object] = lambda progress: None,
) -> T:
    """The result of `work`, done in a thread of its own as long as `progress` grows.

    Stores have deadlines of their own, of minutes or none. A thread that waits for a silent store cannot be
    stopped; it is left behind and does not keep the process alive.

    Args:
        work: what is done.
        progress: how far it is, for example in bytes.
        silence_s: how long it may stand still, in seconds.
        show: is told how far it is, about once a second.

    Raises:
        TimeoutError: `progress` has not changed for `silence_s` seconds.
    """
    fetched = in_background(work, name="fetch")
    seen, heard_at = progress(), time.monotonic()
    while not fetched.done():
        wait([fetched], min(silence_s / 4, 1.0))
        now = progress()
        if now != seen:
            seen, heard_at = now, time.monotonic()
            show(now)
        elif time.monotonic() - heard_at > silence_s and not fetched.done():
            raise TimeoutError(f"nothing was received for {silence_s:g} s")
    return fetched.result()


@contextmanager
def taking_turns(remote: Remote, what: str, silence_s: float = SILENCE_S) -> Iterator[None]:
    """Be the one process of this machine that fetches this; who waits sees the bytes of the one that fetches."""
    remote.cache.mkdir(parents=True, exist_ok=True)
    name = f".strop-{hashlib.sha256(what.encode()).hexdigest()[:16]}.lock"
    files = FileLock(str(remote.cache / name), thread_local=False)
    while_heard(files.acquire, remote.traffic, silence_s)
    try:
        yield
    finally:
        files.release()


def check_room(cache: Path, total: int) -> None:
    """Raise an OSError where the disk of this folder has no room for so many bytes more."""
    free = shutil.disk_usage(cache).free
    if total and total + _ROOM > free:
        raise OSError(errno.ENOSPC, f"it has {in_words(total)}, and {in_words(free)} are free")


def in_words(num_bytes: int) -> str:
    """A number of bytes for a person."""
    return (
        f"{num_bytes / _MEBIBYTE:.0f} MiB" if num_bytes >= 10 * _MEBIBYTE else f"{num_bytes / 1024:.0f} KiB"
    )
