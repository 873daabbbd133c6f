"""Heartbeat of a process: its activity, written to a file every second, for the diagnosis of a run that died or hangs.

A thread of its own writes what the process does, and what it waits for (strop.utils.activity), into a file beside the
logs, which `strop incident` reads. A file that is not written any more says when the process died, or stopped
altogether. A disk that refuses costs the file, not the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from strop.utils import activity
from strop.utils.background import every

SUFFIX = ".heartbeat"
PERIOD_S = 1.0


@contextlib.contextmanager
def heartbeat(log: Path) -> Iterator[None]:
    """Write the activity of a process into a file beside its log: now, every second, and at the end."""
    file = log.with_suffix(SUFFIX)
    _write(file)
    try:
        with every(PERIOD_S, lambda: _write(file), name="heartbeat"):
            yield
    finally:
        _write(file)


def _write(file: Path) -> None:
    now = time.monotonic()
    steps, items = list(activity.activities), list(activity.waits.values())
    name, label, since = min(items, key=lambda item: item[2], default=("", "", now))
    beat = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "at": time.time(),
        "doing": ", ".join(label for label, _ in steps),
        "doing_s": now - steps[-1][1] if steps else 0.0,
        "num_items": len(items),
        "item": f"{name} {label}".strip(),
        "item_s": now - since,
    }
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(".beating")  # a reader finds this one or the one before
        written.write_text(json.dumps(beat))
        written.replace(file)
