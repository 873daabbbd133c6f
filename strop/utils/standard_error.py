"""Standard streams that cannot end or damage a run: the disk behind one may be full, the terminal closed, the reader
gone, or a service may have started the command without one."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


def occupy_descriptors() -> None:
    """Open the null device where a standard stream is closed: the next file would get its number, and with it what
    libraries and other programs write to standard output or error."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            os.set_inheritable(opened, True)


class _Unfailing(io.RawIOBase):
    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any, /) -> int:
        """Bytes that were taken; what cannot be written is lost, and nothing else."""
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return memoryview(data).nbytes


def unfailing(stream: TextIO) -> TextIO:
    """Standard error of this process, over the same descriptor; another stream, such as a test's, stays as it is."""
    if stream is not sys.__stderr__ or not isinstance(stream, io.TextIOWrapper):
        return stream
    buffer = io.BufferedWriter(_Unfailing(stream.fileno()))
    return io.TextIOWrapper(
        buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=True, write_through=True
    )
