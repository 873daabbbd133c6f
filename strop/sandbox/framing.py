"""Messages between a driver and a launcher: a length of four bytes, then that many bytes of JSON."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

_MAX_BYTES = 256 << 20


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Write one message; OSError when the other side is gone or too slow for the socket's timeout."""
    data = json.dumps(message).encode("ascii")
    connection.sendall(struct.pack("!I", len(data)) + data)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """The next message; None at the end. OSError after the socket's timeout."""
    head = _receive_exactly(connection, 4)
    if head is None:
        return None
    (length,) = struct.unpack("!I", head)
    if length > _MAX_BYTES:
        raise OSError(f"a message of {length} bytes is longer than a launcher writes")
    data = _receive_exactly(connection, length)
    if data is None:
        return None
    message = json.loads(data)
    if not isinstance(message, dict):
        raise OSError("a message that is no launcher's")
    return message


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)
