"""An engine that runs in another process, behind the contract of every engine.

Concurrency: one asyncio loop calls it. One connection carries all calls, and is made anew by the call after it has
ended; its end is the end of its calls, each with what happened. A request has no deadline here, as in every engine: its
caller ends it (RolloutClient). All else has one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, get_args

from rollout.engine_process.address import PURPOSE, EngineAddress

from strop.controller.auth_listener import connect_authenticated
from strop.protocol.trajectory import media_of
from strop.rollout.routing.wire import Garbage, Message, Wire, token_of
from strop.rollout.types import Ability, OnToken, Sampling, StopReason, TokenOutput
from strop.rollout.weight_sync.types import (
    Endpoint,
    SyncCorrupted,
    SyncError,
    SyncIncomplete,
    SyncRefused,
    SyncReport,
    UnverifiedWeights,
)

CALL_S = 120.0
"""Deadline of what is no request: longer than the engines' own, whose message says more."""
CONNECT_S = 10.0
"""Deadline of connecting."""
SYNC_S = 1800.0
"""Deadline of taking part in a sync of weights, which has deadlines of its own for each of its steps."""
_ERRORS: Mapping[str, type[Exception]] = {
    error.__name__: error
    for error in (
        ValueError,
        TimeoutError,
        UnverifiedWeights,
        SyncError,
        SyncIncomplete,
        SyncCorrupted,
        SyncRefused,
    )
}


class RemoteEngine:
    """The engine at an address; `connect` makes one."""

    def __init__(self, address: EngineAddress, *, timeout_s: float = CALL_S) -> None:
        """Nothing is connected yet, and version and abilities are unknown.

        Args:
            address: of an EngineServer.
            timeout_s: deadline of each call that is no request, in seconds.
        """
        self._address, self._timeout_s = address, timeout_s
        self._connecting = asyncio.Lock()
        self._connection: _Connection | None = None
        self._version = 0
        self._abilities: frozenset[Ability] = frozenset()
        self._is_closed = False

    @classmethod
    async def connect(cls, address: EngineAddress, *, timeout_s: float = CALL_S) -> RemoteEngine:
        """A connected engine, which knows its version and abilities.

        Raises:
            ConnectionError: nobody answers there, or somebody else.
        """
        engine = cls(address, timeout_s=timeout_s)
        await engine._connected()
        return engine

    @property
    def abilities(self) -> frozenset[Ability]:
        """Those of the served engine, as it said when it was connected; never media."""
        return self._abilities

    @property
    def version(self) -> int:
        """As the served engine said last."""
        return self._version

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        """As the served engine does.

        Raises:
            ConnectionError: the connection ended, or brought something else than an answer.
        """
        if media_of(prompt_ids):
            raise ValueError(
                f"request {request_id} has images or videos, which stay in their process; use an engine that is not "
                f"remote"
            )
        options = {
            "request_id": request_id,
            "prompt_ids": [int(token) for token in prompt_ids],
            "sampling": dataclasses.asdict(sampling),
        }
        connection = await self._connected()
        call = connection.start("generate", options, on_token)
        done = await connection.answer(call)
        tokens = call.tokens
        match done:
            case {"count": int(count), "stop_reason": str(reason)} if count == len(
                tokens
            ) <= sampling.max_tokens and reason in get_args(StopReason):
                return TokenOutput(
                    token_ids=tuple(token for token, _, _ in tokens),
                    log_probs=tuple(log_prob for _, log_prob, _ in tokens),
                    versions=tuple(version for _, _, version in tokens),
                    stop_reason=reason,  # type: ignore[arg-type]  # one of them
                )
        error = Garbage(f"{len(tokens)} tokens came, and the answer is {str(done)[:80]}")
        connection.end(error)
        raise self._named(error)

    async def set_version(self, version: int) -> None:
        """As the served engine does."""
        await self._call("set_version", version=version)

    async def pause(self) -> None:
        """As the served engine does."""
        await self._call("pause")

    async def resume(self) -> None:
        """As the served engine does."""
        await self._call("resume")

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """As the served engine does; without ids, also requests of other callers."""
        await self._call("abort", request_ids=None if request_ids is None else list(request_ids))

    async def flush_cache(self) -> None:
        """As the served engine does."""
        await self._call("flush_cache")

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """As the served engine does."""
        await self._call("sleep", level=level)

    async def wake_up(self, tags: object = None) -> None:
        """As the served engine does."""
        await self._call("wake_up")

    async def health(self) -> Mapping[str, float]:
        """As the served engine does; the connection is made anew where it has ended.

        Raises:
            ConnectionError, TimeoutError: its process does not answer.
        """
        numbers = await self._call("health")
        if not isinstance(numbers, dict) or not all(
            isinstance(name, str) and isinstance(value, float | int) for name, value in numbers.items()
        ):
            raise self._named(Garbage(f"health is {str(numbers)[:80]}"))
        return {name: float(value) for name, value in numbers.items()}

    async def join(self, endpoint: Endpoint, *, index: int) -> None:
        """Have a served VerifiedEngine meet the sender of its weights."""
        await self._call("join", endpoint=dataclasses.asdict(endpoint), index=index)

    async def update_weights(self, version: int) -> SyncReport:
        """Have a served VerifiedEngine take part in the sync to this version; raises as it does."""
        return SyncReport(**await self._call("update_weights", timeout_s=SYNC_S, version=version))

    async def close(self) -> None:
        """Leave: requests from here end there. The process is its owner's to end."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.end(ConnectionAbortedError("the engine was closed"))

    async def _call(self, name: str, *, timeout_s: float | None = None, **options: Any) -> Any:
        limit = timeout_s or self._timeout_s
        try:
            async with asyncio.timeout(limit) as deadline:
                connection = await self._connected()
                return await connection.answer(connection.start(name, options))
        except TimeoutError:
            if not deadline.expired():
                raise
            raise TimeoutError(f"{self._where} did not answer {name!r} within {limit:g} s") from None

    @property
    def _where(self) -> str:
        return f"the rollout engine at {self._address.host}:{self._address.port}"

    def _named(self, error: Exception) -> ConnectionError:
        what = "sends garbage" if isinstance(error, Garbage) else "is not reached"
        return ConnectionError(f"{self._where} {what}: {error}")

    async def _connected(self) -> _Connection:
        async with self._connecting:
            if self._is_closed:
                raise ConnectionAbortedError(f"{self._where} was closed")
            if self._connection is None or self._connection.is_over:
                try:
                    self._connection = await self._new_connection()
                except OSError as error:
                    raise self._named(error) from error
            return self._connection

    async def _new_connection(self) -> _Connection:
        at, limit = self._address, min(CONNECT_S, self._timeout_s)
        connected = await asyncio.to_thread(
            connect_authenticated, at.host, at.port, at.secret, purpose=PURPOSE, timeout_s=limit
        )
        wire = await Wire.over(connected)
        try:
            async with asyncio.timeout(limit):
                hello = await wire.read()
        except TimeoutError:
            wire.close()
            raise TimeoutError(f"it sent no greeting within {limit:g} s") from None
        except BaseException:
            wire.close()
            raise
        match hello:
            case {"hello": {"version": int(version), "abilities": list(abilities)}}:
                self._version = version
                self._abilities = frozenset(one for one in get_args(Ability) if one in abilities)
                return _Connection(wire, self)
        wire.close()
        raise Garbage(f"{str(hello)[:80]} is no greeting")

    def heard_version(self, version: int) -> None:
        """The served engine says its version."""
        self._version = version


class _Call:
    """A call under way."""

    def __init__(self, number: int, on_token: OnToken | None) -> None:
        self.number, self.on_token = number, on_token
        self.tokens: list[tuple[int, float, int]] = []
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class _Connection:
    """A connection and the calls on it."""

    def __init__(self, wire: Wire, engine: RemoteEngine) -> None:
        self._wire, self._engine = wire, engine
        self._numbers = itertools.count()
        self._last = -1
        self._calls: dict[int, _Call] = {}
        self._reader = asyncio.create_task(self._read())
        self.is_over = False

    def start(self, name: str, options: dict[str, Any], on_token: OnToken | None = None) -> _Call:
        """Send a call.

        Raises:
            ConnectionError: the connection has ended.
            ValueError: it is too large.
        """
        call = _Call(next(self._numbers), on_token)
        self._wire.send({"call": call.number, "do": name, "with": options})
        self._last = call.number
        self._calls[call.number] = call
        return call

    async def answer(self, call: _Call) -> Any:
        """What came of it; a caller that is cancelled cancels it there."""
        try:
            return await call.done
        finally:
            if self._calls.pop(call.number, None) is not None and not self.is_over:
                with suppress(ConnectionError):
                    self._wire.send({"cancel": call.number})

    def end(self, error: Exception) -> None:
        """End the connection and every call on it."""
        if self.is_over:
            return
        self.is_over = True
        self._reader.cancel()
        self._wire.close()
        for call in self._calls.values():
            if not call.done.done():
                call.done.set_exception(self._engine._named(error))
        self._calls.clear()

    async def _read(self) -> None:
        try:
            while True:
                self._take(await self._wire.read())
        except Exception as error:  # noqa: BLE001  (whatever ends the reading ends the calls)
            self.end(error)

    def _take(self, message: Message) -> None:
        number = message.get("call")
        if not isinstance(number, int) or not 0 <= number <= self._last:
            raise Garbage(f"{str(message)[:80]} answers no call")
        call = self._calls.get(number)
        match message:
            case {"token": token}:
                if call is not None:
                    call.tokens.append(token_of(token))
                    if call.on_token is not None:
                        call.on_token(*call.tokens[-1])
            case {"done": done, "version": int(version)}:
                self._engine.heard_version(version)
                self._settle(call, done, None)
            case {"failed": [str(kind), str(sentence)]}:
                known = _ERRORS.get(kind)
                error = RuntimeError(f"{kind}: {sentence}") if known is None else known(sentence)
                self._settle(call, None, error)
            case _:
                raise Garbage(f"{str(message)[:80]} is no answer")

    def _settle(self, call: _Call | None, done: Any, error: Exception | None) -> None:
        if call is None or call.done.done():  # nobody waits for it any more
            return
        self._calls.pop(call.number)
        if error is None:
            call.done.set_result(done)
        else:
            call.done.set_exception(error)
