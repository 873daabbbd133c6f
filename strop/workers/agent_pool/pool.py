"""The agent workers of a rank: processes that play its episodes, so that agents and environments that compute neither
wait for each other nor hold the engine up.

The engine, the scorers and whoever listens stay with the rank; an episode asks for tokens through its worker, with the
same keys as it would here, so that the tokens are the same for any number of workers. A worker that dies is replaced,
and its episodes are played again from their beginning, at most twice.

Concurrency: everything on the loop of the player. A worker that says nothing for agent.timeout_s while it has episodes
is killed, so that every wait ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from strop.agents.setup import AgentSetup
from strop.agents.spans import SPANS, Span
from strop.config.save import to_dict
from strop.engines.config import ModelConfig
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards import RewardConfig
from strop.rollout.client import GenerateClient
from strop.rollout.types import Sampling
from strop.workers.agent_pool.wire import (
    MAX_LINE_BYTES,
    line,
    output_out,
    prompt_out,
    read_line,
    sampling_in,
    sampling_out,
    sequence_in,
    span_in,
)
from strop.workers.episodes import EpisodeFailed

logger = logging.getLogger(__name__)

START_S = 600.0
"""Limit of loading the agents and starting what they need, as servers of tools."""
MAX_LOSSES = 3
"""An episode that was lost with so many workers is not played once more: it may be what ends them."""
_PING_S = 5.0
_MIN_SILENCE_S = 30.0
_END_S = 8.0
"""Time for workers to end before they are killed; more than they take themselves."""
_BOOT = "import json,sys;sys.path[:]=json.loads(sys.argv[1]);import strop.workers.agent_pool.child as c;c.main({})"

Played = tuple[tuple[Trajectory, ...], list[Span]]


class WorkerLost(RuntimeError):
    """The process that played an episode is gone."""


class AgentWorkers:
    """The processes; `start` before the first episode, `close` at the end."""

    def __init__(
        self,
        setup: AgentSetup,
        client: GenerateClient,
        model: ModelConfig,
        *,
        reward: RewardConfig | None,
        seed: int,
    ) -> None:
        """Nothing is started yet.

        Args:
            setup: agents as they were loaded here; `setup.config.num_workers` is at least 1.
            client: generates.
            model: with the tokenizer.
            reward: that section of the configuration, in which the sandbox is; None: nothing is started for tools.
            seed: of the run.
        """
        self._client, self._count = client, setup.config.num_workers
        self._silence_s = max(setup.config.timeout_s, _MIN_SILENCE_S)
        self._begin = line("begin", {
            "agent": to_dict(setup.config.with_absolute_paths()), "model": to_dict(model), "seed": seed,
            "template_options": setup.template_options, "max_prompt_tokens": setup.max_prompt_tokens,
            "reward": None if reward is None else to_dict(reward),
        })  # fmt: skip
        self._workers: list[_Worker] = []
        self._lock: asyncio.Lock | None = None

    async def start(self) -> None:
        """Start missing workers; those that live stay.

        Raises:
            ValueError: the agents cannot be loaded there; the sentence is that of `AgentSetup`.
            RuntimeError: a worker died while it loaded them, or took too long.
        """
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            for worker in self._workers:
                if worker.lost:
                    worker.end()
            self._workers = [worker for worker in self._workers if not worker.lost]
            new = [
                _Worker(*_launched(), self._client, self._begin, silence_s=self._silence_s)
                for _ in range(self._count - len(self._workers))
            ]
            self._workers += new
            await asyncio.gather(*(worker.start() for worker in new))

    async def play(self, prompt: Prompt, sample_index: int, sampling: Sampling) -> tuple[Trajectory, ...]:
        """As `play_episode`; SPANS hear what happened there.

        Args:
            prompt, sample_index, sampling: as there.

        Raises:
            EpisodeFailed: it failed there, or was lost with several workers.
            ValueError: its row cannot be handed over; or as `start`.
        """
        losses: list[str] = []
        while len(losses) < MAX_LOSSES:
            if len(self._workers) < self._count or not all(worker.is_ready for worker in self._workers):
                await self.start()
            worker = min(self._workers, key=lambda candidate: candidate.num_episodes)
            try:
                spans = SPANS.get()
                sequences, heard = await worker.play(
                    prompt, sample_index, sampling, listens=spans is not None
                )
                if spans is not None:
                    spans += heard
                return sequences
            except WorkerLost as error:
                logger.warning("the agent worker of %s/%d is lost: %s", prompt.uid, sample_index, error)
                losses.append(str(error))
        raise EpisodeFailed(
            f"{prompt.uid}/{sample_index} was lost with {MAX_LOSSES} agent workers, one after another, and is not "
            f"played again: {'; '.join(losses)}"
        )

    def close(self) -> None:
        """End the processes; a second call does nothing."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.hang_up()
        until = time.monotonic() + _END_S
        for worker in workers:
            worker.end(wait_s=max(0.0, until - time.monotonic()))


def _launched() -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process, and the connection to it; OSError when the system refuses."""
    ours, theirs = socket.socketpair()
    # One thread each: several of them run beside the engine.
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", _BOOT.format(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], start_new_session=True,
                env=environment,
            )  # fmt: skip
        except OSError:
            ours.close()
            raise
    return process, ours


class _Worker:
    """One agent worker process with its running episodes."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        connection: socket.socket,
        client: GenerateClient,
        begin: bytes,
        *,
        silence_s: float,
    ) -> None:
        """Nothing is said to it yet.

        Args:
            process: leads a session of its own.
            connection: to it.
            client: generates.
            begin: the first line.
            silence_s: kill it when it says nothing for so long, though it has episodes.
        """
        self.lost = ""
        """Reason for which it is of no use any more."""
        self._process, self._socket, self._client, self._begin = process, connection, client, begin
        self._silence_s = silence_s
        self._numbers = itertools.count()
        self._episodes: dict[int, tuple[asyncio.Future[Played], Prompt, int]] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._writer: asyncio.StreamWriter | None = None
        self._heard_at = 0.0
        self._is_gone = False

    @property
    def num_episodes(self) -> int:
        return len(self._episodes)

    @property
    def is_ready(self) -> bool:
        """It has loaded the agents, and lives."""
        return bool(self._tasks) and not self.lost

    async def start(self) -> None:
        """Wait until the agents are loaded; raises as `AgentWorkers.start`."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=MAX_LINE_BYTES)
        self._writer.write(self._begin)
        try:
            async with asyncio.timeout(START_S):
                answer_line = await reader.readline()
        except TimeoutError:
            self._lose(f"it did not load the agents within {START_S:g} s")
        else:
            match read_line(answer_line) if answer_line else None:
                case ["ready"]:
                    self._tasks = [
                        asyncio.create_task(self._read(reader)),
                        asyncio.create_task(self._watch()),
                    ]
                    return
                case ["failed", str(sentence)]:
                    self._lose(sentence)
                    raise ValueError(f"agent.num_workers: {sentence}")
                case _:
                    self._lose("it ended while it loaded the agents")
        raise RuntimeError(f"an agent worker (agent.num_workers) could not be started: {self.lost}")

    async def play(self, prompt: Prompt, sample_index: int, sampling: Sampling, *, listens: bool) -> Played:
        """As `AgentWorkers.play`; WorkerLost when the process is gone first."""
        if self.lost:
            raise WorkerLost(self.lost)
        if not self._episodes:
            self._heard_at = time.monotonic()
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        self._episodes[number] = future, prompt, sample_index
        try:
            self._send("play", number, prompt_out(prompt), sample_index, sampling_out(sampling), listens)
            played: Played = await future
            return played
        except asyncio.CancelledError:
            self._send("stop", number)
            raise
        finally:
            del self._episodes[number]

    def _send(self, *message: Any) -> None:
        if not self.lost and self._writer is not None:
            self._writer.write(line(*message))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while text := await reader.readline():
                self._heard_at = time.monotonic()
                self._take(read_line(text))
        except ConnectionError:
            self._lose("it has ended")
        except (ValueError, TypeError, KeyError) as error:
            self._lose(f"it said what no agent worker says: {error}")
        else:
            self._lose("it has ended")

    def _take(self, message: Sequence[Any]) -> None:
        match message:
            case ["generate", int(call), str(), list(), dict(), bool()]:
                task = asyncio.create_task(self._generate(*message[1:]))
                self._calls[call] = task
                task.add_done_callback(lambda _: self._calls.pop(call, None))
            case ["drop", int(call)]:
                if call in self._calls:
                    self._calls[call].cancel()
            case ["played", int(number), list(sequences), list(spans)]:
                if number in self._episodes and not (episode := self._episodes[number])[0].done():
                    future, prompt, index = episode
                    decoded = tuple(sequence_in(fields, prompt, index) for fields in sequences)
                    future.set_result((decoded, [span_in(fields) for fields in spans]))
            case ["raised", int(number), str(sentence)]:
                if number in self._episodes and not (future := self._episodes[number][0]).done():
                    future.set_exception(EpisodeFailed(sentence))
            case ["pong"]:
                pass
            case _:
                raise ValueError(f"{str(message)[:200]}")

    async def _generate(
        self, call: int, request_id: str, ids: list[int], sampling: dict[str, Any], wants_tokens: bool
    ) -> None:
        def hear(token: int, log_prob: float, version: int) -> None:
            self._send("token", call, token, log_prob, version)

        options = {"on_token": hear} if wants_tokens else {}
        try:
            output = await self._client.generate(request_id, tuple(ids), sampling_in(sampling), **options)
        except Exception as error:  # noqa: BLE001  (the agent that asked is told)
            self._send("refused", call, type(error).__name__, str(error))
        else:
            self._send("output", call, output_out(output))

    async def _watch(self) -> None:
        while not self.lost:
            await asyncio.sleep(_PING_S)
            if self._episodes and time.monotonic() - self._heard_at > self._silence_s:
                self._lose(
                    f"it said nothing for {self._silence_s:g} s: an agent held its loop, or it was stopped"
                )
            elif self._episodes:
                self._send("ping")

    def _lose(self, reason: str) -> None:
        """Give it up: its episodes go elsewhere, and what they asked the engine for ends."""
        if self.lost:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.2)
        status = self._process.poll()
        self.lost = reason if status is None else f"{reason} ({_ending(status)})"
        self._kill()
        for future, _, _ in self._episodes.values():
            if not future.done():
                future.set_exception(WorkerLost(self.lost))
        for task in list(self._calls.values()):
            task.cancel()
        if self._writer is not None:
            self._writer.close()

    def hang_up(self) -> None:
        """Let the process end."""
        self.lost = self.lost or "it was closed"
        for task in [*self._tasks, *self._calls.values()]:
            task.cancel()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._writer is not None:
            self._writer.close()

    def end(self, *, wait_s: float = 0.0) -> None:
        """See it gone, and what it has started."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=wait_s)
        self._kill()

    def _kill(self) -> None:
        if not self._is_gone:
            self._is_gone = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _ending(status: int) -> str:
    """`SIGSEGV` or `exit status 3`."""
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name if -status in list(signal.Signals) else f"signal {-status}"
    return f"{name}, often the system's out-of-memory killer" if -status == signal.SIGKILL else name
