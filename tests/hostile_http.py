"""A server on this machine that reads a request and then answers as no server should."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Line:
    """One connection, from the server's side."""

    def __init__(self, connection: socket.socket, is_over: threading.Event) -> None:
        self._connection, self._is_over = connection, is_over

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def drip(self, data: bytes) -> None:
        """One byte now and then, for as long as somebody listens."""
        for byte in data:
            if self._is_over.wait(0.02):
                return
            self.send(bytes([byte]))

    def endless(self, data: bytes) -> None:
        while not self._is_over.is_set():
            self.send(data)


def _some(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    if not data:
        raise OSError("whoever it was has left")
    return data


def _request(connection: socket.socket) -> bytes:
    """A whole request: what is left unread would cut the answer off."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _some(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    (length,) = (
        int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
    )
    while len(body) < length:
        body += _some(connection)
    return body


@contextmanager
def hostile(answer: Callable[[Line], None], *, reads: bool = True) -> Iterator[tuple[str, list[bytes]]]:
    """A server that reads a request and then does as it likes; its address, and what it was sent."""
    listener = socket.create_server(("127.0.0.1", 0))
    is_over, asked, threads = threading.Event(), [], []

    def serve_one(connection: socket.socket) -> None:
        with connection:
            try:
                if reads:
                    asked.append(_request(connection))
                answer(Line(connection, is_over))
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=serve_one, args=(connection,), daemon=True))
            threads[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        is_over.set()
        for thread in [acceptor, *threads]:
            thread.join(5)
