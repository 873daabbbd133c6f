"""JSON objects over a connection, each behind four bytes that say how long it is; nothing is unpickled."""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Message = Mapping[str, Any]
_LENGTH_BYTES = 4
_CHUNK_BYTES = 1 << 16


def framed(message: Message, default: Callable[[Any], Any] | None = None) -> bytes:
    """The bytes of a message; `default` gives a value that JSON knows for one that it does not know."""
    content = json.dumps(message, separators=(",", ":"), default=default).encode("ascii")
    return len(content).to_bytes(_LENGTH_BYTES, "big") + content


class MessageConnection:
    """A connection on which both sides have proved themselves, for one thread at a time."""

    def __init__(self, connection: socket.socket, *, max_bytes: int) -> None:
        self.connection = connection
        self.max_bytes = max_bytes
        """Limit of one message; a length above it is not one of ours."""
        self._buffer = bytearray()
        self._queue: deque[Message] = deque()

    def receive(self) -> Message:
        """The next message.

        Raises:
            OSError, ValueError, RecursionError: as of `take_in`.
        """
        while not self._queue:
            self._queue.extend(self.take_in())
        return self._queue.popleft()

    def take_in(self) -> Iterator[Message]:
        """The messages that one look at the connection completes; it waits where there is nothing to read.

        Raises:
            OSError, ValueError, RecursionError: the other side has ended, or says something else than messages.
        """
        received = self.connection.recv(_CHUNK_BYTES)
        if not received:
            raise ConnectionResetError("the connection was closed")
        self._buffer += received
        while len(self._buffer) >= _LENGTH_BYTES:
            length = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
            if length > self.max_bytes:
                raise ValueError(f"a message of {length} bytes")
            if len(self._buffer) < _LENGTH_BYTES + length:
                return
            content = bytes(self._buffer[_LENGTH_BYTES : _LENGTH_BYTES + length])
            del self._buffer[: _LENGTH_BYTES + length]
            message = json.loads(content)
            if not isinstance(message, dict):
                raise ValueError("a message that is no JSON object")
            yield message
