"""Small JSON messages between the sender and its receivers: what the bytes mean, answers, failures.

One TCP connection per receiver, to an address of the sender's node, behind strop.controller.auth_listener: nothing is
read of
whoever does not know the session's secret. Messages are those of strop.utils.json_messages.

Concurrency: each side uses its channel from one thread at a time; the gate's thread hands over the connections that
have proved themselves. Every wait ends with what was waited for, with the failure that any receiver reports, with
the end of the other process, or with the deadline.
"""

from __future__ import annotations

import queue
import selectors
import socket
import time
from collections import deque
from contextlib import suppress
from typing import Any

from strop.controller.auth_listener import AuthListener, connect_authenticated, new_secret
from strop.rollout.weight_sync.types import Endpoint
from strop.utils.json_messages import Message, MessageConnection, framed

PURPOSE = "weight sync"
MAX_MESSAGE_BYTES = 256 << 20
"""No message comes near this; a length above it is not one of ours."""
_MAX_JOIN_BYTES = 4096
"""Limit of the first message of a receiver, which says who it is."""
PATIENCE = 2.0
"""Within a sync a receiver waits this many times as long as the sender: the sender may itself be waiting for another
receiver, and it alone knows which one."""
_GRACE_S = 1.0
"""After a broken transfer, the time for the side that broke it to say why."""


class ReceiverFailed(Exception):
    """A receiver reports that this sync failed there."""


class SenderGaveUp(ConnectionError):
    """The sender ends this sync; the message says why."""


class SenderChannel:
    """The sender's end, to all receivers."""

    def __init__(self, host: str, *, num_receivers: int, timeout_s: float) -> None:
        """Listen on a free port of this address only.

        Raises:
            ValueError: the address is not one of this machine.
        """
        self.session = new_secret()
        self._welcomed: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._bell, self._rope = socket.socketpair()  # wakes the thread that waits for receivers
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        try:
            self._gate = AuthListener(host, self.session, purpose=PURPOSE, welcome=self._admit)
        except OSError as error:
            self._bell.close()
            self._rope.close()
            raise ValueError(
                f"the weight sync cannot listen on {host} ({error}); give an address of the actor's node"
            ) from error
        self.host = host
        self.port = self._gate.port
        self.num_receivers = num_receivers
        self.timeout_s = timeout_s
        """Limit of each wait, in seconds."""
        self.num_joins = 0
        """Grows whenever a receiver joins, also one in the place of another."""
        self._attempt = 0
        self._peers: dict[int, _Peer] = {}
        self._joined: dict[int, Message] = {}
        self._answers: dict[tuple[str, int, int], str] = {}
        """Reasons, mostly "", by kind, number and receiver."""
        self._lost: dict[int, str] = {}
        """Ends of receivers that are gone since the sync began."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)

    def wait_for_receivers(self) -> list[Message]:
        """Greetings of all receivers, once all have joined.

        Raises:
            TimeoutError: not all joined within the deadline.
        """
        deadline = time.monotonic() + self.timeout_s
        self._attempt = 0  # what is left of an earlier sync is of no interest
        self._pump(0.0)
        while missing := [index for index in range(self.num_receivers) if index not in self._peers]:
            self._pump_until(deadline, f"rollout worker {missing[0]} to join the weight sync")
        return [self._joined[index] for index in range(self.num_receivers)]

    def begin(self, attempt: int) -> None:
        """From now on only answers to this attempt count."""
        self._attempt = attempt
        self._answers.clear()
        self._lost.clear()

    def tell(self, kind: str, **content: Any) -> None:
        """Send a message to every receiver.

        Raises:
            ConnectionError: a receiver is gone, or takes no messages.
        """
        frame = framed({"attempt": self._attempt, "kind": kind, **content})
        for peer in list(self._peers.values()):
            try:
                peer.send(frame, self.timeout_s)
            except OSError as error:
                self._lose(peer, error)
        if self._lost:
            raise ConnectionError(next(iter(self._lost.values())))

    def hear(self, kind: str, number: int, doing: str, *, also: int | None = None) -> None:
        """Wait until every receiver has answered `kind` with this number, or with the number `also`.

        Raises:
            ReceiverFailed: a receiver reports a failure instead.
            ConnectionError: a receiver is gone.
            TimeoutError: an answer did not come within the deadline; `doing` says which one.
        """
        deadline = time.monotonic() + self.timeout_s
        receivers, numbers = range(self.num_receivers), (number, number if also is None else also)
        while waiting := [
            index for index in receivers if not any((kind, one, index) in self._answers for one in numbers)
        ]:
            for index in waiting:  # one that has answered may leave
                if index in self._lost:
                    raise ConnectionError(self._lost[index])
            self._pump_until(deadline, f"rollout worker {waiting[0]} {doing}")

    def say_so(self, kind: str, number: int) -> bool:
        """True if every receiver has answered `kind` with this number, which is not waited for."""
        return all((kind, number, index) in self._answers for index in range(self.num_receivers))

    def reason(self, kind: str, number: int) -> str:
        """The first reason that a receiver gave when it answered `kind` with this number; "" where none did."""
        answers = (
            (index, self._answers.get((kind, number, index), "")) for index in range(self.num_receivers)
        )
        return next((f"rollout worker {index}: {reason}" for index, reason in answers if reason), "")

    def failure_of_receiver(self) -> str:
        """The first failure that a receiver reports within a moment; "" if none does."""
        deadline = time.monotonic() + _GRACE_S
        try:
            while time.monotonic() < deadline:
                self._pump(deadline - time.monotonic())
        except ReceiverFailed as error:
            return str(error)
        return ""

    def close(self) -> None:
        """End all connections."""
        self._gate.close()
        self._take_welcomed()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Peer):
                self._drop(key.data)
        self._selector.close()
        self._bell.close()
        self._rope.close()

    def _admit(self, connection: socket.socket) -> None:
        """In the gate's thread: hand over a connection that knows the secret."""
        self._welcomed.put(connection)
        with suppress(BlockingIOError):  # enough rings are waiting
            self._rope.send(b"!")

    def _take_welcomed(self) -> None:
        with suppress(BlockingIOError):
            self._bell.recv(1 << 16)
        with suppress(queue.Empty):
            while True:
                peer = _Peer(self._welcomed.get_nowait(), max_bytes=_MAX_JOIN_BYTES)
                self._selector.register(peer.connection, selectors.EVENT_READ, peer)

    def _pump_until(self, deadline: float, waiting_for: str) -> None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError(f"waited {self.timeout_s:g} s for {waiting_for}")
        self._pump(remaining_s)

    def _pump(self, timeout_s: float) -> None:
        """Take in what has come; wait for something if nothing has."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._bell:
                self._take_welcomed()
                continue
            peer: _Peer = key.data
            try:
                messages = list(peer.take_in())
            except (OSError, ValueError, RecursionError) as error:
                self._lose(peer, error)
                continue
            for message in messages:
                self._take(peer, message)

    def _take(self, peer: _Peer, message: Message) -> None:
        if peer.index is None:
            self._welcome(peer, message)
        elif message.get("attempt") == self._attempt and message.get("kind") == "failed":
            raise ReceiverFailed(f"rollout worker {peer.index}: {message.get('reason')}")
        elif message.get("attempt") == self._attempt:
            number = message.get("number")
            answer = (str(message.get("kind")), number if isinstance(number, int) else 0, peer.index)
            self._answers[answer] = str(message.get("reason", ""))

    def _welcome(self, peer: _Peer, message: Message) -> None:
        """A receiver says which one it is; it takes the place of one with the same number before it."""
        index = message.get("index")
        if not isinstance(index, int) or not 0 <= index < self.num_receivers:
            self._drop(peer)
        else:
            if index in self._peers:
                self._drop(self._peers[index])
            peer.index, peer.max_bytes = index, MAX_MESSAGE_BYTES
            self._peers[index] = peer
            self._joined[index] = message
            self.num_joins += 1
            self._lost[index] = f"rollout worker {index} started again"

    def _lose(self, peer: _Peer, error: Exception) -> None:
        if peer.index is not None:
            self._lost[peer.index] = f"rollout worker {peer.index} is gone ({error})"
        self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.index is not None and self._peers.get(peer.index) is peer:
            del self._peers[peer.index]


class ReceiverChannel:
    """A receiver's end."""

    def __init__(self, endpoint: Endpoint, *, index: int, timeout_s: float, **content: Any) -> None:
        """Connect and join as receiver number `index`; `content` goes with it.

        Raises:
            ConnectionError: nobody listens there within the deadline.
        """
        self.timeout_s = PATIENCE * timeout_s
        """Limit of each wait within a sync, in seconds."""
        self._begin_timeout_s = timeout_s
        self.host, self.session = endpoint.host, endpoint.session
        self._where = f"the weight sender at {endpoint.host} port {endpoint.port}"
        try:
            connection = connect_authenticated(
                endpoint.host, endpoint.port, endpoint.session, purpose=PURPOSE, timeout_s=timeout_s
            )
        except OSError as error:
            raise ConnectionError(f"{self._where} does not answer ({error})") from error
        self._peer = _Peer(connection, max_bytes=MAX_MESSAGE_BYTES)
        self._queue: deque[Message] = deque()
        self._attempt = 0
        self._send({"index": index, **content})

    def next_begin(self, version: int) -> Message:
        """The sender's next `begin`, or the `offer` before it; one of another version that it has given up already is
        passed over.

        Raises:
            TimeoutError: none came within the deadline.
            SenderGaveUp: the sender has given this version up already.
            ConnectionError: the sender is gone.
        """
        deadline = time.monotonic() + self._begin_timeout_s
        while True:
            message = self._next(deadline, f"{self._begin_timeout_s:g} s for sync {version} to begin")
            if message["kind"] not in ("offer", "begin"):
                continue
            self._attempt = message["attempt"]
            with suppress(TimeoutError):
                self._take_in(0.0, "the rest")
            ended = [m for m in self._queue if m["kind"] == "abort" and m["attempt"] == self._attempt]
            if not ended:
                return message
            if message["version"] == version:
                raise _gave_up(ended[0])

    def next(self, waiting_for: str) -> Message:
        """The next message of the sync that has begun.

        Raises:
            TimeoutError: none came within the deadline.
            SenderGaveUp: the sender ends this sync.
            ConnectionError: the sender is gone.
        """
        deadline = time.monotonic() + self.timeout_s
        while True:
            message = self._next(deadline, f"{self.timeout_s:g} s for {waiting_for}")
            if message["attempt"] != self._attempt:
                continue
            if message["kind"] == "abort":
                raise _gave_up(message)
            return message

    def check(self) -> None:
        """Look whether the sender has ended this sync, without a wait.

        Raises:
            SenderGaveUp: it has.
            ConnectionError: it is gone.
        """
        with suppress(TimeoutError):
            self._take_in(0.0, "nothing")
        ended = [m for m in self._queue if m["kind"] == "abort" and m["attempt"] == self._attempt]
        if ended:
            raise _gave_up(ended[0])

    def cause(self, error: ConnectionError) -> str:
        """Cause of a broken transfer: the sender's word within a moment, or else the error itself."""
        deadline = time.monotonic() + _GRACE_S
        while not isinstance(error, SenderGaveUp) and time.monotonic() < deadline:
            try:
                message = self._next(deadline, "the cause")
            except (TimeoutError, ConnectionError):
                break
            if message["kind"] == "abort" and message["attempt"] == self._attempt:
                return str(_gave_up(message))
        return str(error)

    def tell(self, kind: str, *, number: int = 0, reason: str = "") -> None:
        """Answer the sender.

        Raises:
            ConnectionError: the sender is gone.
        """
        self._send({"attempt": self._attempt, "kind": kind, "number": number, "reason": reason})

    def close(self) -> None:
        """End the connection."""
        self._peer.connection.close()

    def _send(self, message: Message) -> None:
        try:
            self._peer.send(framed(message), self.timeout_s)
        except OSError as error:
            raise ConnectionError(f"{self._where} is gone ({error})") from error

    def _next(self, deadline: float, waited: str) -> Message:
        while not self._queue:
            self._take_in(deadline - time.monotonic(), waited)
        return self._queue.popleft()

    def _take_in(self, timeout_s: float, waited: str) -> None:
        connection = self._peer.connection
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(connection, selectors.EVENT_READ)
                if not selector.select(max(0.0, timeout_s)):
                    raise TimeoutError(f"waited {waited}")
            self._queue.extend(self._peer.take_in())
        except TimeoutError:
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise ConnectionError(f"{self._where} is gone ({error})") from error


class _Peer(MessageConnection):
    """The connection of a receiver, or of one that has not said yet which it is."""

    index: int | None = None
    """Number of the receiver at the other end; None until it has joined."""

    def send(self, frame: bytes, timeout_s: float) -> None:
        self.connection.settimeout(timeout_s)
        self.connection.sendall(frame)


def _gave_up(abort: Message) -> SenderGaveUp:
    return SenderGaveUp(f"the sender gave up: {abort['reason']}")
