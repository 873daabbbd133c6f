"""Authenticated rendezvous store for torch.distributed process groups.

torch's own TCPStore listens on every address of the machine unless it is handed a socket, and on any address it lets
anybody read, change and delete its keys; of a client that died it says nothing before a wait has run out. A
`RendezvousServer` is bound to one address and serves only clients that know the secret of the run; `RendezvousStore` is
a client of it that torch takes for a store. A few hundred bytes per process and group go through it, once.

Messages are those of strop.utils.json_messages; values travel as base64. Both sides have proved themselves before.

Concurrency: the server has a thread per connection, so that one client may wait for a key while others set it. A store
has one connection per thread that uses it, because torch's own threads look into it while others wait. Every wait has a
deadline, that of the store or of the call.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from strop.controller.auth_listener import AuthListener, connect_authenticated, new_secret
from strop.utils.json_messages import Message, MessageConnection, framed
from strop.utils.network_interfaces import keep_to_interface

PURPOSE = "rendezvous of a process group"
MAX_MESSAGE_BYTES = 64 << 20
"""No message comes near this; a length above it is not one of ours."""
MAX_CONNECTIONS = 16384
"""More processes than this have no business here, even with the secret."""
_SLACK_S = 10.0
"""A client gives the rendezvous point this much longer than the deadline of its call, which the other side keeps."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Address and secret of a rendezvous server; plain data, to be handed on over channels that others cannot read."""

    host: str
    port: int
    secret: str = field(repr=False)

    def join(self, *, timeout_s: float) -> RendezvousStore:
        """A store for the next group here; gloo and NCCL keep to the interface on the way to it.

        All processes join their groups in the same order. What an earlier group has left here would be taken for the
        addresses of this one, so that each has keys of its own.

        Args:
            timeout_s: deadline of the connection, and of each wait for which torch sets no other.

        Raises:
            ConnectionError: nobody answers there, or does not know the secret.
        """
        _GROUPS[self] += 1
        store = RendezvousStore(self, timeout_s=timeout_s, group=str(_GROUPS[self]))
        keep_to_interface(store.own_host)
        return store


_GROUPS: Counter[Rendezvous] = Counter()
"""Number of groups that this process has joined at each rendezvous."""


class RendezvousServer:
    """Server of the keys of a group, in one of its processes."""

    def __init__(self, host: str, *, secret: str = "") -> None:
        """Listen on a free port of this address only.

        Args:
            host: an address of this machine.
            secret: what the others must know; a new one where none is given.

        Raises:
            OSError: the address is not one of this machine.
        """
        secret = secret or new_secret()
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._is_open = True
        self._gate = AuthListener(host, secret, purpose=PURPOSE, welcome=self._welcome)
        self.rendezvous = Rendezvous(host=host, port=self._gate.port, secret=secret)
        """Address and secret for the other processes."""

    def close(self) -> None:
        """End all connections; more than once does no harm."""
        self._gate.close()
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _welcome(self, connection: socket.socket) -> None:
        with self._changed:
            if not self._is_open or len(self._connections) >= MAX_CONNECTIONS:
                connection.close()
                return
            self._connections.add(connection)
        threading.Thread(target=self._serve, args=(connection,), name=PURPOSE, daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        messages = MessageConnection(connection, max_bytes=MAX_MESSAGE_BYTES)
        try:
            while True:
                request = messages.receive()
                try:
                    answer = self._answer(request)
                except (KeyError, TypeError, ValueError) as error:
                    answer = {"error": f"the request cannot be read: {type(error).__name__}"}
                connection.sendall(framed(answer))
        except (OSError, ValueError, RecursionError):
            pass  # the other side has ended; what it set stays for the others
        finally:
            with self._changed:
                self._connections.discard(connection)
            connection.close()

    def _answer(self, request: Message) -> dict[str, Any]:
        keys: list[str] = request["keys"]
        match request["do"]:
            case "wait":
                return self._wait(keys, min(float(request["timeout_s"]), threading.TIMEOUT_MAX))
            case "check":
                with self._changed:
                    return {"value": all(key in self._values for key in keys)}
            case "count":
                with self._changed:
                    return {"value": len(self._values)}
            case "delete":
                with self._changed:
                    return {"value": self._values.pop(keys[0], None) is not None}
            case "set":
                return self._set(keys[0], _bytes(request["value"]))
            case "add":
                return self._add(keys[0], int(request["value"]))
            case "exchange":
                return self._exchange(keys[0], _bytes(request["expected"]), _bytes(request["value"]))
        raise ValueError("no such request")

    def _wait(self, keys: list[str], timeout_s: float) -> dict[str, Any]:
        """The value of the first key, once all are there."""
        with self._changed:
            is_complete = self._changed.wait_for(
                lambda: not self._is_open or all(key in self._values for key in keys), timeout_s
            )
            missing = [key for key in keys if key not in self._values]
            if missing or not is_complete:
                return {"missing": missing}
            return {"value": _text(self._values[keys[0]]) if keys else ""}

    def _set(self, key: str, value: bytes) -> dict[str, Any]:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
        return {}

    def _add(self, key: str, amount: int) -> dict[str, Any]:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
        return {"value": total}

    def _exchange(self, key: str, expected: bytes, value: bytes) -> dict[str, Any]:
        """Compare-and-set as of torch's stores: an absent key is set where nothing is expected."""
        with self._changed:
            current = self._values.get(key)
            if current == expected or (current is None and not expected):
                self._values[key] = current = value
                self._changed.notify_all()
            return {"value": _text(expected if current is None else current)}


_OPEN: set[RendezvousStore] = set()
"""torch keeps the C++ half of a store alive, not the Python half that does the work; this does, until `close`."""


class RendezvousStore(dist.Store):  # type: ignore[misc,name-defined]  # torch does not re-export it for types
    """The keys at a rendezvous point, as torch.distributed wants them."""

    def __init__(self, rendezvous: Rendezvous, *, timeout_s: float, group: str = "") -> None:
        """Connect.

        Args:
            rendezvous: where.
            group: its keys are apart from those of other groups at the same place.
            timeout_s: deadline of the connection, and of each wait for which torch sets no other.

        Raises:
            ConnectionError: nobody answers there, or does not know the secret.
        """
        super().__init__()
        self.set_timeout(datetime.timedelta(seconds=timeout_s))
        self._rendezvous, self._prefix = rendezvous, f"{group}/"
        self._connect_s = timeout_s
        self._own = threading.local()
        self.own_host: str = self._messages().connection.getsockname()[0]
        """The address of this process on the way to the rendezvous point."""
        _OPEN.add(self)

    def close(self) -> None:
        """Leave, once no group needs the store any more; more than once does no harm."""
        _OPEN.discard(self)
        self._forget_connection()

    def clone(self) -> RendezvousStore:
        """A store of the same keys for another thread: this one, whose threads have connections of their own."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._ask("set", [key], value=_text(_raw(value)))

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        return _bytes(self._wait([key], self.timeout))

    def add(self, key: str, amount: int) -> int:
        """Add to a number; an absent one is 0."""
        return int(self._ask("add", [key], value=amount)["value"])

    def check(self, keys: Sequence[str]) -> bool:
        """True where all keys are set."""
        return bool(self._ask("check", list(keys))["value"])

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._wait(list(keys), timeout or self.timeout)

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set a key that has the expected value, or is absent where none is expected; the value afterwards."""
        answer = self._ask("exchange", [key], expected=_text(_raw(expected)), value=_text(_raw(value)))
        return _bytes(answer["value"])

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return bool(self._ask("delete", [key])["value"])

    def num_keys(self) -> int:
        """Number of keys of all groups."""
        return int(self._ask("count", [])["value"])

    def _wait(self, keys: list[str], timeout: datetime.timedelta) -> str:
        seconds = timeout.total_seconds()
        answer = self._ask("wait", keys, wait_s=seconds, timeout_s=seconds)
        if "missing" in answer:
            missing = ", ".join(key.removeprefix(self._prefix) for key in answer["missing"][:3])
            raise dist.DistStoreError(  # what torch's own stores raise
                f"waited {seconds:g} s at the rendezvous for {missing}, which another process was to set"
            )
        return str(answer["value"])

    def _ask(self, do: str, keys: list[str], *, wait_s: float = 0.0, **content: Any) -> Message:
        messages = self._messages()
        deadline = wait_s + self._connect_s + _SLACK_S
        try:
            messages.connection.settimeout(deadline)
            request = {"do": do, "keys": [self._prefix + key for key in keys], **content}
            messages.connection.sendall(framed(request))
            answer = messages.receive()
        except OSError as error:
            self._forget_connection()
            raise dist.DistNetworkError(f"the rendezvous of the process group is gone ({error})") from error
        if "error" in answer:
            raise RuntimeError(f"the rendezvous of the process group: {answer['error']}")
        return answer

    def _forget_connection(self) -> None:
        connection: MessageConnection | None = self._own.__dict__.pop("messages", None)
        if connection is not None:
            connection.connection.close()

    def _messages(self) -> MessageConnection:
        """This thread's connection."""
        messages: MessageConnection | None = getattr(self._own, "messages", None)
        if messages is None:
            rendezvous = self._rendezvous
            try:
                connection = connect_authenticated(
                    rendezvous.host,
                    rendezvous.port,
                    rendezvous.secret,
                    purpose=PURPOSE,
                    timeout_s=self._connect_s,
                )
            except OSError as error:
                raise ConnectionError(
                    f"the rendezvous of the process group at {rendezvous.host} port {rendezvous.port} cannot be "
                    f"reached ({error})"
                ) from error
            messages = self._own.messages = MessageConnection(connection, max_bytes=MAX_MESSAGE_BYTES)
        return messages


def _raw(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
