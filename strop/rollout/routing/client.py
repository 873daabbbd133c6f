"""Client of a worker's agents, whose requests any engine of the run may serve.

Until the worker has joined a router, and where that is gone, its own engines serve alone.

Every request has one outcome. One whose engine is lost goes on elsewhere, behind the tokens that were heard of; one
that the router moves ends here and goes on there in the same way. Deadlines of a request are those of the client that
serves it, here or at another worker.

Concurrency: one asyncio loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from strop.controller.auth_listener import connect_authenticated
from strop.protocol.trajectory import media_of
from strop.rollout.client import GenerateClient, NoEngine
from strop.rollout.replicas.partial_request import PartialRequest
from strop.rollout.routing.peers import CONNECT_S, Peer, PeerServer
from strop.rollout.routing.router import PURPOSE, RouterAddress
from strop.rollout.routing.wire import Garbage, Message, Wire
from strop.rollout.types import OnToken, Sampling, TokenOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

ALIVE_S = 1.0
"""Interval at which a serving worker tells the router that it lives."""
MAX_LOSSES = 5
"""A request that was lost with so many replicas is not tried once more: it may be what ends them."""


class _Lost(Exception):
    """The replica of a request does not serve any more."""

    def __init__(self, replica: int, why: str) -> None:
        self.replica = replica
        super().__init__(f"rollout worker {replica}: {why}")


@dataclass(eq=False)
class _Attempt:
    """A request at a replica."""

    replica: int
    change: asyncio.Future[int]
    """Its next replica, or _Lost; unless it ends before."""
    is_over: bool = False


@dataclass(eq=False)
class _Membership:
    """Connection of a worker with the router."""

    wire: Wire
    index: int
    secret: str
    server: PeerServer
    reader: asyncio.Task[None]
    beat: asyncio.Task[None] | None = None
    addresses: dict[int, tuple[str, int]] = field(default_factory=dict)
    peers: dict[int, Peer] = field(default_factory=dict)
    unreachable: set[int] = field(default_factory=set)
    """Workers whose connection ended or could not be made."""
    connecting: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_known: asyncio.Event = field(default_factory=asyncio.Event)
    """The router has said who is there: this worker too."""
    finished: asyncio.Event = field(default_factory=asyncio.Event)


class RoutedClient:
    """Asks the engines of this worker, and those of others where a router says so."""

    def __init__(
        self, local: GenerateClient, *, begins_again: bool = False, records_routing: bool = False
    ) -> None:
        """Nothing is connected yet.

        Args:
            local: client of the engines of this worker.
            begins_again: a request that was lost begins from its first token, for engines whose bits depend on what was
                computed together.
            records_routing: engines record the experts of tokens (rollout.router_replay), and no output goes without.
        """
        self._local, self._begins_again, self._records_routing = local, begins_again, records_routing
        self._membership: _Membership | None = None
        self._numbers = itertools.count()
        self._places: dict[int, asyncio.Future[int]] = {}
        self._attempts: dict[int, _Attempt] = {}

    async def join(
        self,
        address: RouterAddress,
        *,
        index: int,
        host: str,
        capacity: int,
        can_continue: bool,
        copy: int | None = None,
    ) -> None:
        """Connect with the router, and serve other workers; in the place of an earlier router.

        Args:
            address: of the router.
            index: number of this worker.
            host: address of this machine that other workers reach.
            capacity: requests that the engines here run at a time.
            can_continue: they go on in the middle of a response with the tokens that would have followed.
            copy: number of the copy of the model, of which several workers may hold parts; None for one of its own.

        Raises:
            ConnectionError: nobody answers there.
        """
        await self.close()
        try:
            connection = await asyncio.to_thread(
                connect_authenticated,
                address.host,
                address.port,
                address.secret,
                purpose=PURPOSE,
                timeout_s=CONNECT_S,
            )
        except OSError as error:
            where = f"{address.host} port {address.port}"
            raise ConnectionError(f"the rollout router at {where} does not answer ({error})") from error
        wire = await Wire.over(connection)
        server = PeerServer(self._local, host=host, secret=address.secret)
        wire.send({
            "join": index, "at": [*server.at], "capacity": capacity, "continues": can_continue,
            "copy": index if copy is None else copy,
        })  # fmt: skip
        reader = asyncio.create_task(self._listen(wire))
        self._membership = membership = _Membership(wire, index, address.secret, server, reader)
        try:
            async with asyncio.timeout(CONNECT_S):
                await membership.is_known.wait()
        except TimeoutError:
            await self.close()
            raise ConnectionError(f"the rollout router did not answer within {CONNECT_S:g} s") from None

    async def run_together(self, work: Coroutine[Any, Any, T], *, version: int) -> T:
        """The result of this worker's part of a step, once the parts of all have ended; until then its engines serve
        all of them.

        Args:
            work: episodes, whose requests come through `generate`.
            version: policy version of the engines.
        """
        if (membership := self._membership) is None:
            return await work
        membership.finished.clear()
        self.begin(version)
        try:
            result = await work
        except BaseException:
            self._tell({"stop": True})
            raise
        else:
            self._tell({"end": True})
            await membership.finished.wait()
            return result
        finally:
            if membership.beat is not None:
                membership.beat.cancel()
                membership.beat = None

    def begin(self, version: int) -> None:
        """The engines here serve all workers, with this policy version, until the end of a step or the next call."""
        if (membership := self._membership) is None:
            return
        self._tell({"begin": version})
        if membership.beat is None:
            membership.beat = asyncio.create_task(self._beat())

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        """Continue `prompt_ids`.

        Args:
            request_id: its own; requests of one episode are alike up to the last `#`, and go to one replica while that
                is not too busy.
            prompt_ids, sampling, on_token: as of RolloutEngine.

        Raises:
            NoEngine: no replica serves, or it was lost with too many of them.
            Exception: as of the client that serves it.
        """
        if self._membership is None:
            return await self._local.generate(request_id, prompt_ids, sampling, on_token=on_token)
        request = PartialRequest(
            request_id, prompt_ids, sampling, on_token, records_routing=self._records_routing
        )
        excluded: set[int] = set()
        while True:
            number = next(self._numbers)
            await self._placed(number, request, excluded)
            try:
                return await self._served(number, request)
            except _Lost as error:
                request.losses.append(str(error))
                excluded.add(error.replica)
            finally:
                del self._attempts[number]
                self._tell({"leave": number})
            if (reason := request.end()) is not None:
                return request.output(reason)
            if len(request.losses) >= MAX_LOSSES:
                raise NoEngine(
                    f"{request_id} was lost with {MAX_LOSSES} rollout workers, one after another, and is not tried "
                    f"again: {'; '.join(request.losses)}"
                )
            if self._begins_again:
                request.begin_again()

    async def close(self) -> None:
        """Leave the router and the other workers. A second call does nothing."""
        if (membership := self._membership) is None:
            return
        self._leave("the worker was closed")
        await membership.server.close()

    # ------------------------------------------------------------------ a request

    async def _placed(self, number: int, request: PartialRequest, excluded: set[int]) -> None:
        """Wait until a replica that the router names has room.

        Raises:
            NoEngine: none serves.
        """
        if (membership := self._membership) is None:
            self._attempts[number] = _Attempt(_HERE, _future())
            return
        place = _future()
        self._places[number] = place
        episode = request.request_id.rpartition("#")[0] or request.request_id
        stays = bool(media_of(request.prompt_ids))
        not_there = sorted(excluded | membership.unreachable)
        self._tell({"place": number, "episode": episode, "stays": stays, "not": not_there})
        try:
            await place
        except BaseException:
            self._attempts.pop(number, None)
            self._tell({"leave": number})
            raise
        finally:
            del self._places[number]

    async def _served(self, number: int, request: PartialRequest) -> TokenOutput:
        """The output of a request that has a place, there and where it is moved to.

        Raises:
            _Lost: the replica does not serve any more.
        """
        while True:
            attempt = self._attempts[number]
            task = asyncio.create_task(self._ask(attempt, request))
            try:
                waited: list[asyncio.Future[Any]] = [task, attempt.change]
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            finally:
                attempt.is_over = True
                if not task.done():
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                _drop(attempt.change)
                return task.result()
            if (reason := request.end()) is not None:
                _drop(attempt.change)
                return request.output(reason)
            self._attempts[number] = _Attempt(attempt.change.result(), _future())

    async def _ask(self, attempt: _Attempt, request: PartialRequest) -> TokenOutput:
        membership, replica = self._membership, attempt.replica
        name, ids, sampling = request.rest()
        before = len(request.token_ids)

        def hear(token: int, log_prob: float, version: int) -> None:
            if not attempt.is_over:
                request.hear(token, log_prob, version)

        is_here = membership is None or replica in (membership.index, _HERE)
        try:
            if membership is None or is_here:
                output = await self._local.generate(name, ids, sampling, on_token=hear)
            else:
                output = await self._generate_at_peer(membership, replica, name, ids, sampling, hear)
        except NoEngine as error:
            current = self._membership
            if is_here and current is None:
                raise
            if replica == _HERE and current is not None:  # placed while there was no router
                replica = current.index
            self._tell({"refuse": replica, "why": str(error)})
            raise _Lost(replica, str(error)) from error
        return request.answered(output, heard=len(request.token_ids) - before)

    async def _generate_at_peer(
        self,
        membership: _Membership,
        replica: int,
        name: str,
        ids: Sequence[int],
        sampling: Sampling,
        hear: OnToken,
    ) -> TokenOutput:
        """The output of another worker.

        Raises:
            _Lost: it is not reached, and is not asked again before the router names its address anew.
        """
        try:
            peer = await self._peer(membership, replica)
            return await peer.generate(name, ids, sampling, on_token=hear)
        except ConnectionError as error:
            logger.warning("rollout worker %d is not asked any more: %s", replica, error)
            membership.unreachable.add(replica)
            raise _Lost(replica, str(error)) from error

    async def _peer(self, membership: _Membership, replica: int) -> Peer:
        async with membership.connecting:
            peer = membership.peers.get(replica)
            if peer is None or peer.is_over:
                if replica not in membership.addresses:
                    raise ConnectionError("its address is not known")
                peer = await Peer.connect(replica, membership.addresses[replica], membership.secret)
                membership.peers[replica] = peer
            return peer

    # ------------------------------------------------------------------ the router

    def _tell(self, message: Message) -> None:
        if self._membership is not None:
            with suppress(ConnectionError):  # the reader finds out
                self._membership.wire.send(message)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_S)
            self._tell({"alive": True})

    async def _listen(self, wire: Wire) -> None:
        try:
            while True:
                self._take(await wire.read())
        except OSError as error:
            logger.warning("the rollout router is gone (%s): each worker generates for itself", error)
            server = None if self._membership is None else self._membership.server
            self._leave("the rollout router is gone")
            if server is not None:
                await server.close()

    def _take(self, message: Message) -> None:
        membership = self._membership
        assert membership is not None, "it is listened to while it is there"
        match message:
            case {"placed": int(number), "at": int() | None as replica}:
                self._set_place(number, replica, str(message.get("why")))
            case {"moved": int(number), "at": int(replica)}:
                if number in self._attempts and not self._attempts[number].change.done():
                    self._attempts[number].change.set_result(replica)
            case {"lost": int(index), "why": str(why)}:
                self._lose(index, why)
            case {"peers": list(peers)}:
                membership.addresses = {int(index): (str(host), int(port)) for index, host, port in peers}
                membership.unreachable.clear()
                membership.is_known.set()
            case {"finished": True}:
                membership.finished.set()
            case _:
                raise Garbage(f"{str(message)[:80]} is nothing that a router says")

    def _set_place(self, number: int, replica: int | None, why: str) -> None:
        place = self._places.get(number)
        if place is None or place.done():
            return  # its caller was cancelled, and has said so
        if replica is None:
            place.set_exception(NoEngine(f"no rollout worker serves: {why}"))
        else:
            self._attempts[number] = _Attempt(replica, _future())
            place.set_result(replica)

    def _lose(self, index: int, why: str) -> None:
        """A replica does not serve any more."""
        for attempt in self._attempts.values():
            if attempt.replica == index and not attempt.change.done():
                attempt.change.set_exception(_Lost(index, why))

    def _leave(self, why: str) -> None:
        """From now on the engines here serve alone."""
        membership, self._membership = self._membership, None
        if membership is None:
            return
        membership.finished.set()
        membership.wire.close()
        for task in (membership.reader, membership.beat):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        for peer in membership.peers.values():
            peer.end(ConnectionAbortedError(why))
        for number, place in self._places.items():
            if not place.done():
                self._attempts[number] = _Attempt(_HERE, _future())
                place.set_result(_HERE)


_HERE = -1
"""Replica of this worker, where no router has given it a number."""


def _future() -> asyncio.Future[int]:
    return asyncio.get_running_loop().create_future()


def _drop(change: asyncio.Future[int]) -> None:
    """Nobody waits for a change any more."""
    if not change.cancel() and not change.cancelled():
        change.exception()  # looked at, so that nothing is said of it
