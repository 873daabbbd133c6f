"""An engine served to other processes.

Concurrency: everything happens on the engine's loop, but for the gate's thread, which hands connections over. Each
connection's calls end with it: nobody is left to hear of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from types import TracebackType
from typing import Any

from rollout.engine_process.address import PURPOSE, EngineAddress

from strop.controller.auth_listener import AuthListener, new_secret
from strop.rollout.routing.wire import Garbage, Message, Wire, sampling_of, whole
from strop.rollout.types import RolloutEngine
from strop.rollout.weight_sync.types import Endpoint
from strop.rollout.weight_sync.verified_engine import VerifiedEngine

_PLAIN = ("pause", "resume", "flush_cache", "wake_up")
"""Methods without arguments and results."""


class EngineServer(AbstractAsyncContextManager["EngineServer"]):
    """Serves an engine while the context is open; the engine stays its owner's to close.

    Args:
        engine: any engine. Prompts with media stay in its own process.
        host: address of this machine to listen on.
    """

    def __init__(self, engine: RolloutEngine, *, host: str = "127.0.0.1") -> None:
        self._engine, self._host = engine, host
        self._secret = new_secret()
        self._gate: AuthListener | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> EngineAddress:
        """Where, once the context is open."""
        assert self._gate is not None, "served inside the context"
        return EngineAddress(host=self._gate.host, port=self._gate.port, secret=self._secret)

    async def __aenter__(self) -> EngineServer:
        loop = asyncio.get_running_loop()

        def welcome(connection: socket.socket) -> None:
            loop.call_soon_threadsafe(self._admit, connection)

        self._gate = AuthListener(self._host, self._secret, purpose=PURPOSE, welcome=welcome)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._gate is not None, "opened before it is closed"
        await asyncio.to_thread(self._gate.close)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _admit(self, connection: socket.socket) -> None:
        task = asyncio.create_task(self._serve(connection))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """Carry out the calls of one connection until it ends."""
        calls: dict[int, asyncio.Task[None]] = {}
        wire = None
        try:
            wire = await Wire.over(connection)
            abilities = sorted(self._engine.abilities - {"media"})
            wire.send({"hello": {"version": self._engine.version, "abilities": abilities}})
            while True:
                match await wire.read():
                    case {"cancel": int(number)}:
                        if number in calls:
                            calls[number].cancel()
                    case {"call": int(number), "do": str(name), "with": dict(options)} if number not in calls:
                        calls[number] = asyncio.create_task(self._answer(wire, number, name, options))
                        calls[number].add_done_callback(partial(_forget, calls, number))
                    case other:
                        raise Garbage(f"{str(other)[:80]} is no call")
        except OSError:  # it is over, whoever ended it
            pass
        finally:
            if wire is not None:
                wire.close()
            for task in list(calls.values()):
                task.cancel()

    async def _answer(self, wire: Wire, number: int, name: str, options: dict[str, Any]) -> None:
        answer: Message
        try:
            done = await self._do(wire, number, name, options)
            answer = {"call": number, "done": done, "version": self._engine.version}
        except Exception as error:  # noqa: BLE001  (the caller gets it)
            answer = {"call": number, "failed": [type(error).__name__, str(error)]}
        with suppress(ConnectionError):
            wire.send(answer)

    async def _do(self, wire: Wire, number: int, name: str, options: dict[str, Any]) -> Any:
        engine = self._engine
        match name, options:
            case "generate", {
                "request_id": str(request_id),
                "prompt_ids": list(ids),
                "sampling": dict(sampling),
            }:

                def hear(token: int, log_prob: float, version: int) -> None:
                    with suppress(ConnectionError):  # the connection's own task ends this call
                        wire.send({"call": number, "token": [token, log_prob, version]})

                how = sampling_of(sampling)
                output = await engine.generate(request_id, ids, how, on_token=hear)
                return {"count": len(output.token_ids), "stop_reason": output.stop_reason}
            case name, {} if name in _PLAIN and not options:
                return await getattr(engine, name)()
            case "set_version", {"version": version}:
                return await engine.set_version(whole(version))
            case "abort", {"request_ids": list() | None as ids}:
                return await engine.abort(ids)
            case "sleep", {"level": 1 | 2 as level}:
                return await engine.sleep(level)
            case "health", {}:
                return dict(await engine.health())
            case "join", {"endpoint": dict(endpoint), "index": index} if isinstance(engine, VerifiedEngine):
                return await asyncio.to_thread(engine.join, Endpoint(**endpoint), index=whole(index))
            case "update_weights", {"version": version} if isinstance(engine, VerifiedEngine):
                return dataclasses.asdict(await engine.update_weights(whole(version)))
        raise ValueError(
            f"a served engine of type {type(engine).__name__} cannot do {name!r} with {sorted(options)}"
        )


def _forget(calls: dict[int, asyncio.Task[None]], number: int, ended: asyncio.Task[None]) -> None:
    del calls[number]
