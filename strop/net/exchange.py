"""One POST of JSON with one deadline for all of it: connecting, sending, waiting and reading.

A socket's own timeout counts from the last byte, so a server that sends one byte now and then is never too slow for
it. Here another thread ends the exchange at its deadline by closing the socket.

Redirects are not followed (they would carry the key elsewhere) and no proxy of the environment is used: the address is
the one that was configured.
"""

from __future__ import annotations

import contextlib
import io
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import http.client

MAX_ANSWER_BYTES = 16 << 20
_READ_BYTES = 1 << 16


class AnswerTooLargeError(OSError):
    """More came back than MAX_ANSWER_BYTES."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a server sent."""

    status: int
    body: bytes
    retry_after_s: float | None = None
    """What the server asks for before the next request."""


class Exchange:
    """One request; `run` waits for the answer in the calling thread, `abort` ends that from another one."""

    def __init__(self, url: str, body: bytes, headers: Mapping[str, str], *, timeout_s: float) -> None:
        self._body, self._headers = body, dict(headers)
        self._is_aborted = False
        self._socket: socket.socket | None = None
        parts = urlsplit(url)
        assert parts.hostname is not None, "addresses are checked with the configuration"
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        import http.client  # here: every reward worker imports this module, and few processes speak to a service

        self._errors = http.client.HTTPException
        self._context = ssl.create_default_context() if parts.scheme == "https" else None
        kind = http.client.HTTPConnection if self._context is None else http.client.HTTPSConnection
        self._connection = kind(parts.hostname, parts.port, timeout=timeout_s)

    def run(self) -> Answer:
        """Send and wait.

        Raises:
            OSError: there is no whole answer.
        """
        try:
            return self._run()
        except self._errors as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        finally:
            if self._socket is not None:
                self._socket.close()

    def _run(self) -> Answer:
        with contextlib.closing(self._connection) as connection:
            self._connect(connection)
            if self._is_aborted:
                raise TimeoutError("it was not sent in time")
            headers = {"Content-Type": "application/json", "Connection": "close", **self._headers}
            connection.request("POST", self._path, body=self._body, headers=headers)
            response = connection.getresponse()
            body = bytearray()
            with contextlib.closing(response):
                while data := response.read(_READ_BYTES):
                    body += data
                    if len(body) > MAX_ANSWER_BYTES:
                        raise AnswerTooLargeError(f"more than {MAX_ANSWER_BYTES >> 20} MiB came back")
            expected = response.headers.get("Content-Length")
            if expected is not None and response.length:  # http.client counts down what is still to come
                raise OSError(f"the answer was cut after {len(body)} of {expected} bytes")
            return Answer(
                status=response.status,
                body=bytes(body),
                retry_after_s=_seconds(response.headers.get("Retry-After")),
            )

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        """Connect, with a socket that `abort` can close at any time: a connection has it late and forgets it early."""
        plain = socket.create_connection((connection.host, connection.port), connection.timeout)
        self._socket = plain
        if self._context is not None:
            # The handshake is a step of its own, because a server may be slow at it as well.
            self._socket = self._context.wrap_socket(
                plain, server_hostname=connection.host, do_handshake_on_connect=False
            )
            if not self._is_aborted:
                self._socket.do_handshake()
        connection.sock = _Wire(self._socket, lambda: self._is_aborted)

    @property
    def is_aborted(self) -> bool:
        """Whether its time was up."""
        return self._is_aborted

    def abort(self) -> None:
        """Close the socket, so that `run` ends with an error."""
        self._is_aborted = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


class _Wire:
    """A socket for http.client that stops reading once the exchange was aborted.

    Shutting a socket down wakes who waits for it, but does not stop a server that goes on sending: what it sends can
    still be read, for ever.
    """

    def __init__(self, connected: socket.socket, is_aborted: Callable[[], bool]) -> None:
        self._socket, self._is_aborted = connected, is_aborted

    def sendall(self, data: bytes) -> None:
        """As of a socket."""
        self._socket.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        """As of a socket; for reading alone."""
        assert mode == "rb", "http.client reads bytes"
        return io.BufferedReader(_Incoming(self._socket, self._is_aborted))

    def close(self) -> None:
        """The exchange closes the socket at its end."""


class _Incoming(io.RawIOBase):
    def __init__(self, connected: socket.socket, is_aborted: Callable[[], bool]) -> None:
        self._socket, self._is_aborted = connected, is_aborted

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if self._is_aborted():
            raise TimeoutError("the deadline is over")
        return self._socket.recv_into(buffer)


def _seconds(text: str | None) -> float | None:
    """Retry-After as seconds; its other form, a date, is not used by rate limits."""
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None
