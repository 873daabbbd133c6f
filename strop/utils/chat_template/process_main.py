"""Main program of the process in which chat templates are rendered."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from strop.utils.chat_template.rendering import render
from strop.utils.json_messages import MessageConnection, framed

MEMORY_BYTES = 1 << 30
"""Memory for renderings, beside what the process has when it is ready."""
_MAX_DEPTH = 3000
"""Of calls: above that of messages, which JSON carries up to the default of 1000."""
_ORPHANED_S = 60
"""Seconds after which a rendering ends whose parent is gone."""


def main(fd: int) -> None:
    """Render what is asked for over a socket until the other side closes it."""
    from transformers.utils import chat_template_utils  # noqa: F401  (before the memory is limited)

    messages = MessageConnection(socket.socket(fileno=fd), max_bytes=1 << 31)
    sys.setrecursionlimit(_MAX_DEPTH)
    _limit_memory()
    messages.connection.sendall(framed({"is_ready": True}))
    with contextlib.suppress(OSError):
        while True:
            request = messages.receive()
            signal.alarm(_ORPHANED_S)
            messages.connection.sendall(framed(_reply(request)))
            signal.alarm(0)


def _reply(request: Any) -> dict[str, Any]:
    try:
        texts, spans = render(**request)
    except (RecursionError, MemoryError) as error:
        return {"stopped": type(error).__name__}
    except Exception as error:  # noqa: BLE001  (a template may raise any; the parent says so)
        return {"refused": f"{error}" or type(error).__name__}
    return {"texts": texts, "spans": spans}


def _limit_memory() -> None:
    usage = Path("/proc/self/statm")
    if not usage.is_file():  # not Linux: the deadline ends what takes all memory
        return
    used = int(usage.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
