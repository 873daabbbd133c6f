"""A process in which chat templates are rendered that nobody has vouched for.

Jinja's sandbox keeps a template from files and processes, but not from looping for ever or from making a text of
gigabytes. The process has a limit on its memory, and is killed when a rendering passes its deadline. It starts with the
first rendering, is kept, and ends with this process.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from typing import Any

from strop.utils.chat_template.rendering import Rendered
from strop.utils.json_messages import MessageConnection, framed

DEADLINE_S = 20.0
"""Seconds for one rendering. Templates of well-known models take below one with 128,000 tokens or 500 turns."""
_START_S = 120.0
_MAX_REPLY_BYTES = 1 << 28
_BOOT = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from strop.utils.chat_template.process_main import main
main({})
"""


class RenderingStopped(Exception):
    """A rendering did not end, or made too much; the message is the error that ended it, where there was one."""


class _RenderingProcess:
    def __init__(self) -> None:
        """Start it, and wait until it has loaded transformers.

        Raises:
            RuntimeError: it did not start.
        """
        ours, theirs = socket.socketpair()
        self._parent = os.getpid()
        self._messages = MessageConnection(ours, max_bytes=_MAX_REPLY_BYTES)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", _BOOT.format(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], start_new_session=True,
                env=environment,
            )  # fmt: skip
        ours.settimeout(_START_S)
        try:
            self._messages.receive()
        except (OSError, ValueError) as error:
            self.end()
            raise RuntimeError(f"the process that renders chat templates did not start: {error}") from error

    @property
    def is_alive(self) -> bool:
        """It takes requests of this process."""
        return self._parent == os.getpid() and self._process.poll() is None

    def ask(self, frame: bytes) -> Any:
        """Its reply to a request; OSError or ValueError where it passes the deadline, dies, or says too much."""
        self._messages.connection.settimeout(DEADLINE_S)
        self._messages.connection.sendall(frame)
        return self._messages.receive()

    def end(self) -> None:
        """Kill it; a second call does nothing."""
        self._messages.connection.close()
        if self._parent == os.getpid():
            self._process.kill()
            self._process.wait()


_lock = threading.Lock()
_kept: _RenderingProcess | None = None


def render_apart(chat_template: str, now: str, **arguments: Any) -> Rendered:
    """Render in the process; arguments as of `rendering.render`.

    Raises:
        RenderingStopped: it did not end, or made too much.
        ValueError: the template refuses the messages, or has an error.
        RecursionError: the messages are nested too deeply.
        RuntimeError: the process did not start.
    """
    global _kept
    frame = framed({"chat_template": chat_template, "now": now, **arguments}, default=_plain)
    with _lock:
        if _kept is None or not _kept.is_alive:
            end_process()
            _kept = _RenderingProcess()
        try:
            reply = _kept.ask(frame)
        except (
            BaseException
        ) as error:  # also a Ctrl-C, after which a late reply would answer the next request
            end_process()
            if isinstance(error, OSError | ValueError):
                raise RenderingStopped from None
            raise
    match reply:
        case {"texts": list(texts), "spans": list(spans)}:
            return texts, spans
        case {"stopped": str(error_name)}:
            with _lock:
                end_process()  # what it still holds counts against the next rendering
            raise RenderingStopped(error_name)
        case {"refused": str(reason)}:
            raise ValueError(reason)
    raise RuntimeError(f"no reply of the process that renders chat templates: {str(reply)[:200]}")


@atexit.register
def end_process() -> None:
    """End the process, where there is one."""
    global _kept
    process, _kept = _kept, None
    if process is not None:
        process.end()


def _plain(value: object) -> Any:
    """A value that JSON does not know, as transformers shows it to a template."""
    from transformers.utils.chat_template_utils import _plain_template_data

    return _plain_template_data(value)
