"""A listening socket that lets in only who proves to know the secret of the run.

Nothing that a stranger says is parsed: before the proof a connection is worth 64 bytes, compared in constant time.

    server -> client   32 random bytes
    client -> server   32 random bytes of its own, and HMAC-SHA256(secret, "client", purpose, both)
    server -> client   HMAC-SHA256(secret, "server", purpose, both)

Both sides have proved that they know the secret, which itself never travels; a conversation that was overheard opens
nothing, because the next one has other random bytes. What follows on the connection is neither encrypted nor signed:
this keeps strangers out, not somebody who can change packets on their way.

Concurrency: each gate has one thread, which alone touches its sockets until they are welcome. `welcome` is called in
that thread and must not wait. A stranger holds nothing up: connections on probation are bounded in number and time.
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
MAX_STRANGERS = 256
"""Connections that have not proved anything yet; one more, and the oldest of them goes."""
HANDSHAKE_S = 5.0
"""How long a connection may take to prove itself."""
QUIET_S = 60.0
"""At most one line about strangers in this time."""
_LOOK_S = 1.0
"""How often the gate looks whether somebody is late."""
_BACKLOG = 256
_AT_ONCE = 64
"""Connections that are taken before those that are there are heard again."""
_RETRY_S = 0.05
_CONNECT_S = 0.5
"""How long one attempt to connect may take: the system tries again ever more rarely while strangers fill the queue."""

logger = logging.getLogger(__name__)


class TurnedAway(ConnectionError):
    """The other side does not know the secret of this run, or does not believe that we do."""


def new_secret() -> str:
    """A secret that nobody else has, as text."""
    return secrets.token_hex(SECRET_BYTES)


@dataclass(eq=False)
class _Stranger:
    """A connection on probation."""

    connection: socket.socket
    nonce: bytes
    until: float
    said: bytearray = field(default_factory=bytearray)


class Gate:
    """A port of one address, and the thread that decides who comes in."""

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
        self._strangers: dict[socket.socket, _Stranger] = {}  # in the order in which they came
        self._complaints = _Complaints(purpose)
        self._selector = selectors.DefaultSelector()
        self._bell, self._rope = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name=f"gate of the {purpose}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; connections that were welcomed stay. More than once does no harm."""
        with contextlib.suppress(OSError):
            self._rope.close()
        self._thread.join()

    def _serve(self) -> None:
        try:
            while True:
                events = self._selector.select(_LOOK_S if self._strangers else None)
                ready = {key.fileobj for key, _ in events}
                if self._bell in ready:
                    return
                for connection in ready - {self._listener}:
                    assert isinstance(connection, socket.socket)
                    self._hear(self._strangers[connection])
                if self._listener in ready:
                    self._open()
                self._dismiss_late()
        finally:
            for stranger in list(self._strangers.values()):
                self._forget(stranger).close()
            self._selector.close()
            self._listener.close()
            self._bell.close()

    def _open(self) -> None:
        """Take those that wait."""
        try:
            for _ in range(_AT_ONCE):
                self._challenge(self._listener.accept()[0])
        except BlockingIOError:  # no more of them
            pass
        except OSError:  # one has gone again, or this process has no descriptor left
            time.sleep(_RETRY_S)

    def _challenge(self, connection: socket.socket) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            self._refuse(next(iter(self._strangers.values())), "too many came at once")
        connection.setblocking(False)
        stranger = _Stranger(connection, secrets.token_bytes(NONCE_BYTES), time.monotonic() + HANDSHAKE_S)
        self._strangers[connection] = stranger
        self._selector.register(connection, selectors.EVENT_READ)
        self._say(stranger, stranger.nonce)

    def _hear(self, stranger: _Stranger) -> None:
        wanted = NONCE_BYTES + PROOF_BYTES
        try:
            heard = stranger.connection.recv(wanted - len(stranger.said))
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        stranger.said += heard
        if not heard:
            self._refuse(stranger, "it went without a proof")
        elif len(stranger.said) == wanted:
            self._judge(stranger)

    def _judge(self, stranger: _Stranger) -> None:
        theirs, proof = bytes(stranger.said[:NONCE_BYTES]), bytes(stranger.said[NONCE_BYTES:])
        if not hmac.compare_digest(
            proof, _proof(self._secret, "client", self._purpose, stranger.nonce, theirs)
        ):
            self._refuse(stranger, "it does not know the secret")
        elif self._say(stranger, _proof(self._secret, "server", self._purpose, stranger.nonce, theirs)):
            connection = self._forget(stranger)
            connection.setblocking(True)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._welcome(connection)

    def _say(self, stranger: _Stranger, text: bytes) -> bool:
        """A few bytes always find room, unless the other side is gone."""
        try:
            stranger.connection.sendall(text)
        except OSError:
            self._refuse(stranger, "it went without a proof")
            return False
        return True

    def _dismiss_late(self) -> None:
        now = time.monotonic()
        while self._strangers and (oldest := next(iter(self._strangers.values()))).until < now:
            self._refuse(oldest, f"it proved nothing within {HANDSHAKE_S:g} s")

    def _refuse(self, stranger: _Stranger, reason: str) -> None:
        self._forget(stranger).close()
        self._complaints.add(reason)

    def _forget(self, stranger: _Stranger) -> socket.socket:
        del self._strangers[stranger.connection]
        self._selector.unregister(stranger.connection)
        return stranger.connection


class _Complaints:
    """One line about strangers now and then, however many come; nothing of what they said is in it."""

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


def knock(host: str, port: int, secret: str, *, purpose: str, timeout_s: float) -> socket.socket:
    """A connection to a gate, on which both sides have proved themselves; it blocks, without a deadline.

    Raises:
        TurnedAway: whoever listens there does not know the secret, or says that we do not.
        OSError: nobody listens there, or did not answer in time.
    """
    remember_secret(secret)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _attempt(host, port, secret, purpose, deadline)
        except (TurnedAway, ConnectionRefusedError):
            raise
        except (ConnectionError, TimeoutError):  # strangers may have crowded it out
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)


def _attempt(host: str, port: int, secret: str, purpose: str, deadline: float) -> socket.socket:
    connect_s = min(max(deadline - time.monotonic(), _RETRY_S), _CONNECT_S)
    connection = socket.create_connection((host, port), timeout=connect_s)
    try:
        return _proved(connection, secret, purpose, min(deadline, time.monotonic() + HANDSHAKE_S))
    except BaseException:
        connection.close()
        raise


def _proved(connection: socket.socket, secret: str, purpose: str, deadline: float) -> socket.socket:
    theirs = _exactly(connection, NONCE_BYTES, deadline)
    own = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(own + _proof(secret, "client", purpose, theirs, own))
    answer = _exactly(connection, PROOF_BYTES, deadline)
    if not hmac.compare_digest(answer, _proof(secret, "server", purpose, theirs, own)):
        raise TurnedAway("whoever listens there does not know the secret of this run")
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    held = b""
    while len(held) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other side did not prove itself in time")
        connection.settimeout(left)
        part = connection.recv(count - len(held))
        if not part:
            raise ConnectionResetError("the other side turned us away")
        held += part
    return held


def _proof(secret: str, side: str, purpose: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    # The lengths of the first two parts are fixed by their values, which both sides know.
    text = b"\0".join([f"strop {side}".encode(), purpose.encode(), server_nonce + client_nonce])
    return hmac.digest(secret.encode(), text, "sha256")
