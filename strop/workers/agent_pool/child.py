"""Agent worker process: agents, tools and environments of many episodes on one asyncio loop.

The engine is in the process that started this one: tokens are asked for over a pair of sockets that has no address. The
worker ends when the other end closes, however that happened, and takes with it what its tools have started.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strop.agents.config import AgentConfig
from strop.agents.episodes import play_episode
from strop.agents.setup import AgentSetup
from strop.agents.spans import SPANS, Span
from strop.config.load import config_of
from strop.engines.config import ModelConfig
from strop.engines.tokenizer import load_tokenizer
from strop.protocol.trajectory import media_of
from strop.rewards import RewardConfig
from strop.rollout.client import NoEngine, RolloutTimeout
from strop.rollout.types import OnToken, Sampling, TokenOutput
from strop.utils.sanitize import described
from strop.workers.agent_pool.wire import (
    MAX_LINE_BYTES,
    line,
    output_in,
    prompt_in,
    read_line,
    sampling_in,
    sampling_out,
    sequence_out,
    span_out,
)

logger = logging.getLogger(__name__)

_END_S = 5.0
"""Time to end in good order once the other end is gone; then the process and what it has forked are killed."""
_KINDS = {kind.__name__: kind for kind in (ValueError, RolloutTimeout, NoEngine)}
"""Exceptions that agents may want to tell apart; any other error of an engine is a RuntimeError here."""


def main(number: int) -> None:
    """Serve the socket with this file descriptor until it closes."""
    connection = socket.socket(fileno=number)
    threading.Thread(target=_end_with_owner, args=(number,), name="life-line", daemon=True).start()
    asyncio.run(_serve(connection))


def _end_with_owner(number: int) -> None:
    """Kill the process group some time after the other end has closed: agents may hold the loop for ever."""
    gone = select.poll()
    gone.register(number, getattr(select, "POLLRDHUP", 0))
    gone.poll()
    time.sleep(_END_S)
    os.killpg(os.getpgid(0), signal.SIGKILL)


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_LINE_BYTES)

    def send(*message: Any) -> None:
        writer.write(line(*message))

    try:
        setup, seed = _begun(read_line(await reader.readline())[1])
    except Exception as error:
        logger.exception("an agent worker cannot begin")
        send("failed", str(error) or described(error))
        await writer.drain()
        return
    try:
        send("ready")
        worker = _Worker(setup, seed, send)
        while text := await reader.readline():
            worker.take(read_line(text))
    except ConnectionError:
        pass  # its owner is gone
    finally:
        setup.close()


def _begun(settings: Mapping[str, Any]) -> tuple[AgentSetup, int]:
    """Agents with all they need, and the seed of the run.

    Raises:
        ValueError, RuntimeError: the sentence says what cannot be loaded or started here.
    """
    setup = AgentSetup(
        config_of(AgentConfig, settings["agent"]),
        load_tokenizer(config_of(ModelConfig, settings["model"])),
        template_options=settings["template_options"],
        max_prompt_tokens=settings["max_prompt_tokens"],
    )
    if settings["reward"] is not None:
        setup.start(config_of(RewardConfig, settings["reward"]))
    return setup, settings["seed"]


class _Worker:
    """The episodes of this process."""

    def __init__(self, setup: AgentSetup, seed: int, send: Callable[..., None]) -> None:
        self._setup, self._seed, self._send = setup, seed, send
        self._client = _Client(send)
        self._episodes: dict[int, asyncio.Task[None]] = {}

    def take(self, message: Sequence[Any]) -> None:
        """Do what a message asks for; ValueError for one of another form."""
        match message:
            case ["play", int(number), *what]:
                task = asyncio.create_task(self._play(number, *what))
                self._episodes[number] = task
                task.add_done_callback(lambda _: self._episodes.pop(number, None))
            case ["stop", int(number)]:
                if number in self._episodes:
                    self._episodes[number].cancel()
            case ["ping"]:
                self._send("pong")
            case ["token" | "output" | "refused", int(), *_]:
                self._client.take(message)
            case _:
                raise ValueError(f"no message to an agent worker: {str(message)[:200]}")

    async def _play(
        self, number: int, prompt: dict[str, Any], sample_index: int, sampling: dict[str, Any], listens: bool
    ) -> None:
        spans: list[Span] | None = [] if listens else None
        SPANS.set(spans)
        try:
            sequences = await play_episode(
                prompt_in(prompt), sample_index, sampling_in(sampling),
                client=self._client, seed=self._seed, setup=self._setup,
            )  # fmt: skip
            encoded = [sequence_out(sequence) for sequence in sequences]
        except Exception as error:
            logger.exception("an episode of %s failed", prompt.get("uid"))
            self._send("raised", number, described(error))
        else:
            self._send("played", number, encoded, [span_out(span) for span in spans or ()])


class _Client:
    """The engine in the other process, as agents see it."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._open: dict[int, tuple[asyncio.Future[TokenOutput], OnToken | None]] = {}

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        """As `GenerateClient`.

        Raises:
            ValueError: the request is refused, or has images.
            RuntimeError: whatever else the engine raised.
        """
        if media_of(prompt_ids):
            raise ValueError("agent workers ask for no answers to images: set agent.num_workers=0")
        call, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._open[call] = future, on_token
        wants_tokens = on_token is not None
        self._send("generate", call, request_id, tuple(prompt_ids), sampling_out(sampling), wants_tokens)
        try:
            output: TokenOutput = await future
            return output
        except asyncio.CancelledError:
            self._send("drop", call)
            raise
        finally:
            del self._open[call]

    def take(self, message: Sequence[Any]) -> None:
        """An answer; one that nobody waits for is passed over."""
        kind, call, *content = message
        if call not in self._open or (future := self._open[call][0]).done():
            return
        on_token = self._open[call][1]
        if kind == "output":
            future.set_result(output_in(content[0]))
        elif kind == "refused":
            future.set_exception(_KINDS.get(content[0], RuntimeError)(content[1]))
        elif on_token is not None:
            on_token(*content)
