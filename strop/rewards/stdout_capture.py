"""Output of reward functions: the first lines on the terminal, everything in a log file of bounded size.

Used from the thread of the worker processes only. What cannot be written is lost, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from strop.utils.sanitize import redacted

log = logging.getLogger(__name__)

SHOWN_LINES = 10
"""Lines of standard output that a pool shows: enough to see what is printed, few enough to see all else."""
MAX_LOG_BYTES = 64 << 20
"""Size at which a log file ends."""
MAX_LINE_BYTES = 1 << 16
"""A longer line is cut into several."""
TAIL_BYTES = 8192
"""Of a stream that are kept: enough for a stack dump."""
AS_IT_IS = {"is_as_it_is": True}
"""Of a record that is a line for the person who watches, and no warning of ours."""


class OutputLog:
    """Takes the lines of all workers of a pool."""

    def __init__(self, file: Path | None, *, shows: bool = True) -> None:
        self._path = file
        self._file: BinaryIO | None = None
        self._to_show = SHOWN_LINES if shows else 0

    def take(self, line: str, *, is_shown: bool) -> None:
        """A line without its end; shown where it went to standard output and few were shown before."""
        self._write(line)
        if is_shown and self._to_show > 0:
            self._to_show -= 1
            log.warning("reward prints: %s", redacted(line), extra=AS_IT_IS)
            if not self._to_show:
                destination = "is not shown" if self._path is None else f"is in {self._path}"
                log.warning("reward prints: what follows %s", destination, extra=AS_IT_IS)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: str) -> None:
        if self._path is None:
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            if self._file.tell() < MAX_LOG_BYTES:
                self._file.write(f"{redacted(line)}\n".encode(errors="backslashreplace"))
        except OSError as error:
            log.warning("what reward functions print is not logged: %s: %s", self._path, error.strerror)
            self._path = None


class LineStream(asyncio.Protocol):
    """One output stream of a worker, line by line."""

    def __init__(self, take: Callable[[str], None]) -> None:
        """Args:
        take: gets each line, without its end.
        """
        self._take, self._rest = take, b""
        self.tail = b""
        """The last bytes that came."""
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        """Bytes as they arrive."""
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._take(line.decode(errors="backslashreplace").rstrip("\r"))

    def connection_lost(self, _error: Exception | None) -> None:
        """The stream is over: what has no end of line counts as one."""
        if self._rest:
            self.data_received(b"\n")
        self.ended.set()
