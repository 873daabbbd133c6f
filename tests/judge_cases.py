"""A real HTTP server that plays a judge or a reward model, with the manners that tests ask for."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from http_server import LocalServer

Play = Callable[["Handler", dict[str, Any], int], None]
"""Answers a request: the handler, the request's JSON and its number, counted from 0."""


@dataclass
class Service:
    """What the server saw."""

    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at: list[float] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    play: Play
    service: Service
    lock: threading.Lock

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            number = len(self.service.requests)
            self.service.requests.append(body)
            self.service.headers.append(dict(self.headers))
            self.service.at.append(time.monotonic())
        with contextlib.suppress(OSError):
            type(self).play(self, body, number)

    def log_message(self, *_: Any) -> None:
        pass

    def send(self, data: Any, status: int = 200, **headers: str) -> None:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def cut(self, data: bytes = b"") -> None:
        """Say that much comes, send a little, and reset the connection."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + data)
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


def completion(text: str, *, prompt_tokens: int = 100, completion_tokens: int = 20) -> dict[str, Any]:
    return {
        "choices": [{"message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens},
    }


@contextlib.contextmanager
def serve(play: Play) -> Iterator[Service]:
    service = Service()
    handler = type(
        "Playing", (Handler,), {"play": staticmethod(play), "service": service, "lock": threading.Lock()}
    )
    server = LocalServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    service.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
