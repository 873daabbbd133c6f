"""Router of a run: keeps the routing table for rollout workers in other processes, and tells them its decisions.

    worker -> router   {"join": index, "at": [host, port], "capacity": n, "continues": bool, "copy": n}
                       {"begin": version}                     its engines serve
                       {"place": n, "episode": text, "stays": bool, "not": [index, ...]}
                       {"leave": n}                           the request has ended
                       {"refuse": index, "why": text}         the engines there are lost
                       {"end": true}                          its own episodes have ended; it serves the others on
                       {"stop": true}                         it serves no longer
                       {"alive": true}
    router -> worker   {"peers": [[index, host, port], ...]}
                       {"placed": n, "at": index}             null: nobody serves; with "why"
                       {"moved": n, "at": index}              in the middle of the request
                       {"lost": index, "why": text}
                       {"finished": true}                     the episodes of all workers have ended

A synchronous step begins when workers begin and is finished when all have ended: until then each serves the others.
Asynchronous rollout has no end.

Concurrency: a thread with an asyncio loop of its own. A worker in a step that says nothing for `silence_s` is lost, as
one whose connection ends.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field

from strop.controller.auth_listener import AuthListener, new_secret
from strop.rollout.routing.table import PATIENCE_S, Decision, RoutedRequest, RoutingStats, RoutingTable
from strop.rollout.routing.wire import Garbage, Message, Wire, whole
from strop.utils.background_loop import EventLoopThread

PURPOSE = "rollout router"
TICK_S = 0.2
"""Interval at which the balance and the silence of workers are looked at."""
SILENCE_S = 120.0
"""Workers say once a second that they live, if a step of their engine does not hold them up."""
HEADSTART_S = 10.0
"""Deadline of the first message on a connection."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RouterAddress:
    """Address of a router; plain data, to be handed on over channels that others cannot read."""

    host: str
    port: int
    secret: str = field(repr=False)
    """Only who proves to know it is heard, here and by the workers."""


@dataclass(eq=False)
class _Member:
    """A connected worker."""

    index: int
    wire: Wire
    at: tuple[str, int]
    heard_at: float
    has_ended: bool = False


class Router:
    """Router of the rollout workers of a run; `close` ends it."""

    def __init__(self, host: str, *, patience_s: float = PATIENCE_S, silence_s: float = SILENCE_S) -> None:
        """Listen on a free port of this address only.

        Args:
            host: an address of this machine that workers reach.
            patience_s: as of RoutingTable.
            silence_s: a serving worker that says nothing for so long is lost.

        Raises:
            OSError: the address is not one of this machine.
        """
        self._silence_s = silence_s
        self._table = RoutingTable(patience_s=patience_s)
        self._members: dict[int, _Member] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = EventLoopThread("rollout router")
        secret = new_secret()
        try:
            self._gate = AuthListener(host, secret, purpose=PURPOSE, welcome=self._welcome)
        except OSError:
            self._loop.close()
            raise
        self.address = RouterAddress(host=host, port=self._gate.port, secret=secret)
        """Address for the workers."""
        self._loop.submit(self._watch())

    def take_stats(self) -> RoutingStats:
        """Numbers since the call before."""

        async def take() -> RoutingStats:
            return self._table.take_stats(time.monotonic())

        return self._loop.run(take())

    def close(self) -> None:
        """End all connections. A second call does nothing."""
        self._gate.close()
        self._loop.close()

    # ------------------------------------------------------------------ connections

    def _welcome(self, connection: socket.socket) -> None:
        """In the thread of the listener."""
        self._loop.submit(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        wire = await Wire.over(connection)
        member: _Member | None = None
        cause = "its connection to the router has ended"
        try:
            async with asyncio.timeout(HEADSTART_S):
                member = self._join(wire, await wire.read())
            while True:
                message = await wire.read()
                member.heard_at = time.monotonic()
                self._take(member, message)
        except (OSError, ValueError, TimeoutError) as error:
            cause = f"{cause} ({error})"
        finally:
            wire.close()
            if member is not None and self._members.get(member.index) is member:
                self._lose(member, cause)

    def _join(self, wire: Wire, message: Message) -> _Member:
        match message:
            case {
                "join": index,
                "at": [str(host), int(port)],
                "capacity": capacity,
                "continues": bool(continues),
                "copy": copy,
            }:
                member = _Member(whole(index), wire, (host, port), time.monotonic())
            case _:
                raise Garbage(f"{str(message)[:80]} joins nobody")
        if (before := self._members.get(member.index)) is not None:
            before.wire.close()
            self._lose(before, "it has joined again")
        self._members[member.index] = member
        self._table.add(member.index, capacity=whole(capacity), can_continue=continues, copy=whole(copy))
        peers = [[other.index, *other.at] for other in self._members.values()]
        for other in self._members.values():
            self._tell(other, {"peers": peers})
        return member

    def _lose(self, member: _Member, cause: str) -> None:
        """A worker is gone: its requests too, and those of others that it had go elsewhere."""
        del self._members[member.index]
        was_serving = self._table.replicas[member.index].is_serving
        decisions = self._table.remove(member.index, time.monotonic())
        if was_serving:
            logger.warning("rollout worker %d does not serve any more: %s", member.index, cause)
            for other in self._members.values():
                self._tell(other, {"lost": member.index, "why": cause})
        self._announce(decisions)
        self._finish_if_all_ended()

    # ------------------------------------------------------------------ messages

    def _take(self, member: _Member, message: Message) -> None:
        now = time.monotonic()
        table, index = self._table, member.index
        match message:
            case {"alive": True}:
                pass
            case {"place": number, "episode": str(episode), "stays": bool(stays), "not": list(excluded)}:
                request = RoutedRequest(
                    index, whole(number), episode, stays, frozenset(whole(other) for other in excluded)
                )
                self._announce(table.place(request, now))
            case {"leave": number}:
                self._announce(table.leave(index, whole(number), now))
            case {"begin": version}:
                self._announce(table.begin(index, whole(version), now))
            case {"refuse": int(refused), "why": str(why)} if refused in table.replicas:
                self._stop(refused, why)
            case {"refuse": int(), "why": str()}:
                pass  # it is gone already
            case {"stop": True}:
                self._stop(index, "it has ended its call")
                member.has_ended = True
                self._finish_if_all_ended()
            case {"end": True}:
                member.has_ended = True
                self._finish_if_all_ended()
            case _:
                raise Garbage(f"{str(message)[:80]} is nothing that a worker says")

    def _stop(self, index: int, why: str) -> None:
        if not self._table.replicas[index].is_serving:
            return
        decisions = self._table.stop(index, why, time.monotonic())
        for other in self._members.values():
            self._tell(other, {"lost": index, "why": why})
        self._announce(decisions)

    def _finish_if_all_ended(self) -> None:
        members = list(self._members.values())
        if not members or not all(member.has_ended for member in members):
            return
        now = time.monotonic()
        for member in members:
            member.has_ended = False
            self._announce(self._table.stop(member.index, "it is between two calls", now))
            self._tell(member, {"finished": True})

    def _announce(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            request = decision.request
            member = self._members.get(request.origin)
            if member is None:
                continue
            message: Message = {"moved" if decision.is_move else "placed": request.number}
            message["at"] = decision.replica
            if decision.replica is None:
                message["why"] = self._table.causes()
            self._tell(member, message)

    def _tell(self, member: _Member, message: Message) -> None:
        with suppress(ConnectionError):  # its own task finds out, and ends it
            member.wire.send(message)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            self._announce(self._table.rebalance(now))
            for member in list(self._members.values()):
                is_serving = self._table.replicas[member.index].is_serving
                if is_serving and now - member.heard_at > self._silence_s:
                    member.wire.close()
                    self._lose(member, f"it said nothing for {self._silence_s:g} s")
