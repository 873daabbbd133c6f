"""Authenticated TCP listener: lets in only peers that prove to know the secret of the run.

Nothing that an unauthenticated peer sends is parsed; before the proof a connection is worth 64 bytes, compared in
constant time.

    server -> client   32 random bytes
    client -> server   32 random bytes of its own, and HMAC-SHA256(secret, "client", purpose, both)
    server -> client   HMAC-SHA256(secret, "server", purpose, both)

Both sides have proved that they know the secret, which itself never travels; a conversation that was overheard opens
nothing, because the next one has other random bytes. What follows on the connection is neither encrypted nor signed:
this keeps strangers out, not somebody who can change packets on their way.

Concurrency: each listener has one thread, which alone touches its sockets until they are welcome. `welcome` is called
in that thread and must not wait. Such a peer holds nothing up: pending connections are bounded in number and time.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from strop.utils.sanitize import remember_secret

SECRET_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_PENDING = 256
"""Connections that are not authenticated yet; one more, and the oldest of them goes."""
HANDSHAKE_S = 5.0
"""Timeout of the handshake of a connection."""
QUIET_S = 60.0
"""At most one line about refused connections in this time."""
_CHECK_S = 1.0
"""Interval of the check for late connections."""
_BACKLOG = 256
_ACCEPT_BATCH = 64
"""Connections accepted before the pending ones are read again."""
_RETRY_S = 0.05
_CONNECT_S = 0.5
"""Timeout of one attempt to connect: the system tries again ever more rarely while strangers fill the queue."""

logger = logging.getLogger(__name__)


class AuthenticationRefused(ConnectionError):
    """The other side does not know the secret of this run, or does not believe that we do."""


def new_secret() -> str:
    """A secret that nobody else has, as text."""
    return secrets.token_hex(SECRET_BYTES)


@dataclass(eq=False)
class _PendingConnection:
    """A connection that is not authenticated yet."""

    connection: socket.socket
    nonce: bytes
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class AuthListener:
    """Listener on one port of one address, and the thread that authenticates its connections."""

    def __init__(
        self, host: str, secret: str, *, purpose: str, welcome: Callable[[socket.socket], None]
    ) -> None:
        """Listen on a free port of this address only.

        Args:
            host: an address of this machine.
            secret: what a client must know.
            purpose: what the port is for, in a word or two; for messages, and part of the proof.
            welcome: takes each connection that has proved itself; it blocks, and belongs to the receiver from then on.

        Raises:
            OSError: the address is not one of this machine.
        """
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        remember_secret(secret)
        self._secret, self._purpose, self._welcome = secret, purpose, welcome
        self._pending: dict[socket.socket, _PendingConnection] = {}  # in the order in which they came
        self._refusals = _RefusalLog(purpose)
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=f"gate of the {purpose}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; connections that were welcomed stay. More than once does no harm."""
        with contextlib.suppress(OSError):
            self._wake_writer.close()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while True:
                events = self._selector.select(_CHECK_S if self._pending else None)
                ready = {key.fileobj for key, _ in events}
                if self._wake_reader in ready:
                    return
                for connection in ready - {self._listener}:
                    assert isinstance(connection, socket.socket)
                    self._receive(self._pending[connection])
                if self._listener in ready:
                    self._accept_waiting()
                self._refuse_late()
        finally:
            for pending in list(self._pending.values()):
                self._remove(pending).close()
            self._selector.close()
            self._listener.close()
            self._wake_reader.close()

    def _accept_waiting(self) -> None:
        """Accept the waiting connections."""
        try:
            for _ in range(_ACCEPT_BATCH):
                self._challenge(self._listener.accept()[0])
        except BlockingIOError:  # no more of them
            pass
        except OSError:  # one has gone again, or this process has no descriptor left
            time.sleep(_RETRY_S)

    def _challenge(self, connection: socket.socket) -> None:
        if len(self._pending) >= MAX_PENDING:
            self._refuse(next(iter(self._pending.values())), "too many came at once")
        connection.setblocking(False)
        pending = _PendingConnection(
            connection, secrets.token_bytes(NONCE_BYTES), time.monotonic() + HANDSHAKE_S
        )
        self._pending[connection] = pending
        self._selector.register(connection, selectors.EVENT_READ)
        self._send(pending, pending.nonce)

    def _receive(self, pending: _PendingConnection) -> None:
        num_bytes = NONCE_BYTES + PROOF_BYTES
        try:
            part = pending.connection.recv(num_bytes - len(pending.received))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        pending.received += part
        if not part:
            self._refuse(pending, "it went without a proof")
        elif len(pending.received) == num_bytes:
            self._verify(pending)

    def _verify(self, pending: _PendingConnection) -> None:
        client_nonce, proof = bytes(pending.received[:NONCE_BYTES]), bytes(pending.received[NONCE_BYTES:])
        if not hmac.compare_digest(
            proof, _proof(self._secret, "client", self._purpose, pending.nonce, client_nonce)
        ):
            self._refuse(pending, "it does not know the secret")
        elif self._send(pending, _proof(self._secret, "server", self._purpose, pending.nonce, client_nonce)):
            connection = self._remove(pending)
            connection.setblocking(True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._welcome(connection)

    def _send(self, pending: _PendingConnection, text: bytes) -> bool:
        """A few bytes always find room, unless the other side is gone."""
        try:
            pending.connection.sendall(text)
        except OSError:
            self._refuse(pending, "it went without a proof")
            return False
        return True

    def _refuse_late(self) -> None:
        now = time.monotonic()
        while self._pending and (oldest := next(iter(self._pending.values()))).deadline < now:
            self._refuse(oldest, f"it proved nothing within {HANDSHAKE_S:g} s")

    def _refuse(self, pending: _PendingConnection, reason: str) -> None:
        self._remove(pending).close()
        self._refusals.add(reason)

    def _remove(self, pending: _PendingConnection) -> socket.socket:
        del self._pending[pending.connection]
        self._selector.unregister(pending.connection)
        return pending.connection


class _RefusalLog:
    """Rate-limited log of refused connections; nothing of what they sent is in it."""

    def __init__(self, purpose: str) -> None:
        self._purpose = purpose
        self._number = 0
        self._next = 0.0

    def add(self, reason: str) -> None:
        self._number += 1
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + QUIET_S
        are = "connection was" if self._number == 1 else "connections were"
        logger.warning("%d %s turned away at the %s (%s)", self._number, are, self._purpose, reason)
        self._number = 0


def connect_authenticated(
    host: str, port: int, secret: str, *, purpose: str, timeout_s: float
) -> socket.socket:
    """An authenticated connection to an `AuthListener`, proved by both sides; it blocks, without a deadline.

    Raises:
        AuthenticationRefused: whoever listens there does not know the secret, or says that we do not.
        OSError: nobody listens there, or did not answer in time.
    """
    remember_secret(secret)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _attempt(host, port, secret, purpose, deadline)
        except (AuthenticationRefused, ConnectionRefusedError):
            raise
        except (ConnectionError, TimeoutError):  # strangers may have crowded it out
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)


def _attempt(host: str, port: int, secret: str, purpose: str, deadline: float) -> socket.socket:
    connect_s = min(max(deadline - time.monotonic(), _RETRY_S), _CONNECT_S)
    connection = socket.create_connection((host, port), timeout=connect_s)
    try:
        return _authenticated(connection, secret, purpose, min(deadline, time.monotonic() + HANDSHAKE_S))
    except BaseException:
        connection.close()
        raise


def _authenticated(connection: socket.socket, secret: str, purpose: str, deadline: float) -> socket.socket:
    server_nonce = _receive_exactly(connection, NONCE_BYTES, deadline)
    client_nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(client_nonce + _proof(secret, "client", purpose, server_nonce, client_nonce))
    answer = _receive_exactly(connection, PROOF_BYTES, deadline)
    if not hmac.compare_digest(answer, _proof(secret, "server", purpose, server_nonce, client_nonce)):
        raise AuthenticationRefused("whoever listens there does not know the secret of this run")
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    received = b""
    while len(received) < count:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the other side did not prove itself in time")
        connection.settimeout(remaining_s)
        part = connection.recv(count - len(received))
        if not part:
            raise ConnectionResetError("the other side turned us away")
        received += part
    return received


def _proof(secret: str, side: str, purpose: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    # The lengths of the first two parts are fixed by their values, which both sides know.
    text = b"\0".join([f"strop {side}".encode(), purpose.encode(), server_nonce + client_nonce])
    return hmac.digest(secret.encode(), text, "sha256")
