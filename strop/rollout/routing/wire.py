"""Frames of JSON on a connection that strop.controller.auth_listener let in: requests to engines of other processes.

A frame is four bytes of length and JSON text. Both sides bound what they read and what they keep for a peer that reads
nothing, and check every field: what does not fit ends the connection.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import socket
from collections.abc import Iterator
from typing import Any

from strop.protocol.routed_experts import RoutedExperts
from strop.rollout.types import Sampling

MAX_FRAME_BYTES = 16 << 20
"""A prompt of two million tokens."""
MAX_UNREAD_BYTES = 64 << 20
"""Bytes that wait for a peer that does not read; with more it is cut off."""
UNREAD_S = 60.0
"""A peer that reads nothing for so long is cut off."""
EXPERT_PART_BYTES = 4 << 20
"""Bytes of experts in one frame, before they are text; a part holds one token at least."""
_LENGTH_BYTES = 4
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))
"""A peer that is gone without a word is noticed after a minute, also where nothing is said."""

Message = dict[str, Any]


class Garbage(ConnectionError):
    """A message that is not of this protocol."""


class Wire:
    """One connection, for frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()

    @classmethod
    async def over(cls, connection: socket.socket) -> Wire:
        """Take a connected socket over."""
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        return cls(*await asyncio.open_connection(sock=connection))

    def send(self, message: Message) -> None:
        """Send one frame, without waiting.

        Raises:
            ValueError: it is too large.
            ConnectionError: the connection has ended, or the peer reads nothing.
        """
        text = json.dumps(message, separators=(",", ":")).encode()
        if len(text) > MAX_FRAME_BYTES:
            raise ValueError(
                f"a message of {len(text)} bytes between rollout workers; at most {MAX_FRAME_BYTES} fit"
            )
        transport = self._writer.transport
        if transport.is_closing():
            raise ConnectionResetError("the connection has ended")
        if transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            transport.abort()
            raise ConnectionAbortedError("the other side reads nothing")
        self._writer.write(len(text).to_bytes(_LENGTH_BYTES, "big") + text)

    async def send_in_turn(self, message: Message) -> None:
        """Send one frame when the peer has read most of what was sent before: of many large ones one at a time.

        Raises:
            ValueError, ConnectionError: as of `send`.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(UNREAD_S):
                    await self._writer.drain()
            except TimeoutError:
                self.close()
                raise ConnectionAbortedError(f"the other side has read nothing for {UNREAD_S:g} s") from None
            self.send(message)

    async def read(self) -> Message:
        """The next frame.

        Raises:
            Garbage: what comes is none.
            ConnectionError: the connection has ended.
        """
        try:
            size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "big")
            if size > MAX_FRAME_BYTES:
                raise Garbage(f"a frame of {size} bytes was announced; at most {MAX_FRAME_BYTES} fit")
            text = await self._reader.readexactly(size)
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("the other side has ended the connection") from None
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            raise Garbage(f"{text[:40]!r} is no JSON") from None
        if not isinstance(message, dict):
            raise Garbage(f"{text[:40]!r} is no message")
        return message

    def close(self) -> None:
        """End the connection now."""
        self._writer.transport.abort()


def sampling_of(value: Any) -> Sampling:
    """Sampling from the form that `dataclasses.asdict` gave it.

    Raises:
        ValueError: it is something else.
    """
    try:
        stops = tuple(whole(stop) for stop in value["stop_token_ids"])
        return Sampling(**{**value, "stop_token_ids": stops})
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a way to sample: {str(value)[:200]} ({error})") from None


def whole(value: Any) -> int:
    """A whole number of at least 0.

    Raises:
        ValueError: it is something else.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]} is no whole number of at least 0")
    return value


def token_of(value: Any) -> tuple[int, float, int]:
    """Id, log-prob and version of a token.

    Raises:
        Garbage: it is something else.
    """
    match value:
        case [int(token), float() | int() as log_prob, int(version)] if (
            token >= 0 and version >= 0 and math.isfinite(log_prob) and log_prob <= 1e-3
        ):
            return token, float(log_prob), version
    raise Garbage(f"{str(value)[:80]} is no token with its log-prob and version")


def expert_parts(experts: RoutedExperts) -> Iterator[list[Any]]:
    """Parts of the experts of a request, each of which fits into a frame."""
    size = max(1, EXPERT_PART_BYTES // experts.token_bytes)
    for start in range(0, len(experts), size):
        part = b"".join(experts.tokens[start : start + size])
        yield [experts.num_layers, experts.num_chosen, base64.b64encode(part).decode()]


def with_part(experts: RoutedExperts | None, value: Any) -> RoutedExperts:
    """Experts with those of one more part.

    Raises:
        Garbage: it is something else.
    """
    match value:
        case [int(num_layers), int(num_chosen), str(text)] if num_layers > 0 and num_chosen > 0:
            first = RoutedExperts(num_layers=num_layers, num_chosen=num_chosen, tokens=())
            if experts is None or experts.first(0) == first:
                try:
                    return (experts or first).with_bytes(base64.b64decode(text, validate=True))
                except ValueError as error:
                    raise Garbage(f"{text[:40]!r} is no record of experts ({error})") from None
    raise Garbage(f"{str(value)[:80]} is no record of experts, or not of the same routers")
