"""What a process does, written down every second, so that a run that died or hangs can be looked into.

A process says what it does (`doing`) and which things it waits for (`item`); a thread of its own writes both into a
file beside the logs, which `strop incident` reads. A file that is not written any more says when the process died, or
stopped altogether. A disk that refuses costs the file, not the run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from strop.base.background import every

SUFFIX = ".heartbeat"
PERIOD_S = 1.0

_doing: list[tuple[str, float]] = []
_items: dict[int, tuple[str, str, float]] = {}
_numbers = itertools.count()


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """The process does this, within what it did before; for its main thread."""
    _doing.append((what, time.monotonic()))
    try:
        yield
    finally:
        _doing.pop()


@contextlib.contextmanager
def item(name: str) -> Iterator[Callable[[str], None]]:
    """Something that is waited for, beside others; what is given says what is done with it now."""
    number, since = next(_numbers), time.monotonic()
    _items[number] = (name, "", since)

    def now(what: str) -> None:
        _items[number] = (name, what, since)

    try:
        yield now
    finally:
        del _items[number]


@contextlib.contextmanager
def beating(file: Path) -> Iterator[None]:
    """Write into this file what the process does, now, every second, and at the end."""
    _write(file)
    try:
        with every(PERIOD_S, lambda: _write(file), name="heartbeat"):
            yield
    finally:
        _write(file)


def _write(file: Path) -> None:
    now = time.monotonic()
    steps, items = list(_doing), list(_items.values())
    name, what, since = min(items, key=lambda one: one[2], default=("", "", now))
    beat = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "at": time.time(),
        "doing": ", ".join(what for what, _ in steps),
        "doing_s": now - steps[-1][1] if steps else 0.0,
        "num_items": len(items),
        "item": f"{name} {what}".strip(),
        "item_s": now - since,
    }
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(".beating")  # a reader finds this one or the one before
        written.write_text(json.dumps(beat))
        written.replace(file)
