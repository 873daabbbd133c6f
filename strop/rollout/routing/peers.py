"""Requests to the engines of other workers: served at one end, asked at the other.

    asks     {"call": n, "id": text, "prompt": [...], "sampling": {...}}
             {"cancel": n}
    serves   {"call": n, "token": [id, log-prob, version]}
             {"call": n, "experts": [layers, chosen, base64]}, in parts, where engines record them
             {"call": n, "done": [number of tokens, stop reason]}
             {"call": n, "failed": [type, sentence]}

Concurrency: everything happens on the loop of the worker, but for the thread of the listener, which hands connections
over. The end of a connection is the end of its calls. A call has no deadline here: whoever serves it bounds its time,
and the router says who is lost.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, get_args

from strop.controller.auth_listener import AuthListener, connect_authenticated
from strop.protocol.routed_experts import RoutedExperts
from strop.rollout.client import GenerateClient, NoEngine, RolloutTimeout
from strop.rollout.routing.wire import Garbage, Message, Wire, expert_parts, sampling_of, token_of, with_part
from strop.rollout.types import OnToken, Sampling, StopReason, TokenOutput

PURPOSE = "requests between rollout workers"
CONNECT_S = 10.0
"""Deadline of connecting."""
_ERRORS: Mapping[str, type[Exception]] = {
    error.__name__: error for error in (ValueError, TimeoutError, RolloutTimeout, NoEngine)
}


class PeerServer:
    """Serves the engines of a worker to the others."""

    def __init__(self, client: GenerateClient, *, host: str, secret: str) -> None:
        """Listen on a free port of this address only; inside the loop that serves.

        Args:
            client: of the engines of this worker.
            host: an address of this machine.
            secret: of the router.
        """
        self._client = client
        self._connections: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()

        def welcome(connection: socket.socket) -> None:
            loop.call_soon_threadsafe(self._admit, connection)

        self._gate = AuthListener(host, secret, purpose=PURPOSE, welcome=welcome)
        self.at = (host, self._gate.port)
        """Host and port."""

    async def close(self) -> None:
        """End all connections and their calls."""
        await asyncio.to_thread(self._gate.close)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _admit(self, connection: socket.socket) -> None:
        task = asyncio.create_task(self._serve(connection))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        calls: dict[int, asyncio.Task[None]] = {}
        wire = await Wire.over(connection)
        try:
            while True:
                match await wire.read():
                    case {"cancel": int(number)}:
                        if number in calls:
                            calls[number].cancel()
                    case {
                        "call": int(number),
                        "id": str(name),
                        "prompt": list(prompt),
                        "sampling": dict(sampling),
                    } if number not in calls:
                        calls[number] = asyncio.create_task(
                            self._answer(wire, number, name, prompt, sampling)
                        )
                        calls[number].add_done_callback(partial(_forget, calls, number))
                    case other:
                        raise Garbage(f"{str(other)[:80]} is no call")
        except OSError:  # it is over, whoever ended it
            pass
        finally:
            wire.close()
            for task in list(calls.values()):
                task.cancel()

    async def _answer(self, wire: Wire, number: int, name: str, prompt: list[int], sampling: Any) -> None:
        def hear(token: int, log_prob: float, version: int) -> None:
            with suppress(ConnectionError):  # the connection's own task ends this call
                wire.send({"call": number, "token": [token, log_prob, version]})

        answer: Message
        try:
            output = await self._client.generate(name, prompt, sampling_of(sampling), on_token=hear)
            for part in () if output.routed_experts is None else expert_parts(output.routed_experts):
                await wire.send_in_turn({"call": number, "experts": part})
            answer = {"call": number, "done": [len(output.token_ids), output.stop_reason]}
        except Exception as error:  # noqa: BLE001  (the caller gets it)
            answer = {"call": number, "failed": [type(error).__name__, str(error)]}
        with suppress(ConnectionError):
            wire.send(answer)


class _Call:
    """A call under way."""

    def __init__(self, on_token: OnToken) -> None:
        self.on_token = on_token
        self.tokens: list[tuple[int, float, int]] = []
        self.experts: RoutedExperts | None = None
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


class Peer:
    """Connection to another worker."""

    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self._name = wire, name
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self.is_over = False
        """The connection has ended."""
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, index: int, at: tuple[str, int], secret: str) -> Peer:
        """Connect with the worker of this index.

        Raises:
            ConnectionError: nobody answers there, or somebody else.
        """
        name = f"rollout worker {index} at {at[0]}:{at[1]}"
        try:
            connection = await asyncio.to_thread(
                connect_authenticated, *at, secret, purpose=PURPOSE, timeout_s=CONNECT_S
            )
        except OSError as error:
            raise ConnectionError(f"{name} is not reached: {error}") from error
        return cls(await Wire.over(connection), name)

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling, *, on_token: OnToken
    ) -> TokenOutput:
        """As the client of the engines there.

        Raises:
            ConnectionError: the connection ended, or brought something else than an answer.
        """
        number, call = next(self._numbers), _Call(on_token)
        if self.is_over:
            raise ConnectionError(f"the connection with {self._name} has ended")
        self._wire.send(
            {
                "call": number,
                "id": request_id,
                "prompt": [int(token) for token in prompt_ids],
                "sampling": dataclasses.asdict(sampling),
            }
        )
        self._calls[number] = call
        try:
            done = await call.done
        finally:
            if self._calls.pop(number, None) is not None and not self.is_over:
                with suppress(ConnectionError):
                    self._wire.send({"cancel": number})
        match done:
            case [int(count), str(reason)] if count == len(call.tokens) and reason in get_args(StopReason):
                token_ids, log_probs, versions = (
                    zip(*call.tokens, strict=True) if call.tokens else ((), (), ())
                )
                return TokenOutput(
                    token_ids=token_ids, log_probs=log_probs, versions=versions,
                    stop_reason=reason,  # type: ignore[arg-type]  # one of them
                    routed_experts=call.experts,
                )  # fmt: skip
        error = Garbage(
            f"{len(call.tokens)} tokens came by on_token, which is told every one, and the answer is {str(done)[:80]}"
        )
        self.end(error)
        raise error

    def end(self, error: Exception) -> None:
        """End the connection and every call on it."""
        if self.is_over:
            return
        self.is_over = True
        self._reader.cancel()
        self._wire.close()
        for call in self._calls.values():
            if not call.done.done():
                call.done.set_exception(ConnectionError(f"{self._name} is lost: {error}"))
        self._calls.clear()

    async def _read(self) -> None:
        try:
            while True:
                self._take(await self._wire.read())
        except Exception as error:  # noqa: BLE001  (whatever ends the reading ends the calls)
            self.end(error)

    def _take(self, message: Message) -> None:
        match message:
            case {"call": int(number)}:
                call = self._calls.get(number)
            case _:
                raise Garbage(f"{str(message)[:80]} answers no call")
        if call is None or call.done.done():  # nobody waits for it any more
            return
        match message:
            case {"token": token}:
                call.tokens.append(token_of(token))
                call.on_token(*call.tokens[-1])
            case {"experts": part}:
                call.experts = with_part(call.experts, part)
            case {"done": list(done)}:
                self._calls.pop(number)
                call.done.set_result(done)
            case {"failed": [str(kind), str(sentence)]}:
                self._calls.pop(number)
                known = _ERRORS.get(kind)
                call.done.set_exception(
                    RuntimeError(f"{kind}: {sentence}") if known is None else known(sentence)
                )
            case _:
                raise Garbage(f"{str(message)[:80]} is no answer")


def _forget(calls: dict[int, asyncio.Task[None]], number: int, _: asyncio.Task[None]) -> None:
    del calls[number]
