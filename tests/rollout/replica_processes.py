"""Native engines in processes of their own, behind a line that can go dead or bring garbage."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import time
from contextlib import AbstractAsyncContextManager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from fork_server import CONTEXT
from rollout.engine_process.address import EngineAddress
from rollout.engine_process.engine import RemoteEngine
from rollout.engine_process.server import EngineServer

from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.rollout.native.engine import NativeEngine

START_S = 120.0
STEP_S = 0.003
"""What a step of the small model takes longer, so that there is time for something to happen."""


def slow_down(engine: NativeEngine) -> None:
    """Make each step take a while, whichever way the engine computes it."""
    step = engine._batch.step

    def slow(version: int) -> None:
        time.sleep(STEP_S)
        step(version)

    engine._batch.step = slow  # type: ignore[method-assign]


def serve(folder: str, version: int, file: str) -> None:
    """The process: an engine, until it is killed."""
    torch.set_num_threads(1)
    model = load_model(ModelConfig(path=folder, dtype="float32"), device="cpu")

    async def body() -> None:
        engine = NativeEngine(model, max_running=4, version=version)
        slow_down(engine)
        async with EngineServer(engine) as server:
            Path(f"{file}.part").write_text(json.dumps(dataclasses.asdict(server.address)))
            Path(f"{file}.part").rename(file)
            await asyncio.Event().wait()

    asyncio.run(body())


class Line:
    """A relay between us and a process. It can swallow everything, with all connections open; or say nonsense."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._is_dead = False
        self._writers: list[asyncio.StreamWriter] = []
        self._relays: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None

    async def open(self) -> int:
        """Listen; the port."""
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def go_dead(self) -> None:
        self._is_dead = True

    def say_nonsense(self) -> None:
        for writer in self._writers:
            writer.write(b"\x00\x00\x00\x06garble")

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._relays.append(asyncio.create_task(self._relay(reader, writer)))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, to_there = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self._writers.append(writer)
        await asyncio.gather(self._copy(reader, to_there), self._copy(there, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if not self._is_dead:
                    writer.write(data)
        if not self._is_dead:
            writer.close()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        for relay in self._relays:
            relay.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)


class ReplicaProcesses(AbstractAsyncContextManager["ReplicaProcesses"]):
    """Processes by number, each behind its line; they end with the context."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._folder, self._scratch = folder, scratch
        self.processes: dict[int, BaseProcess] = {}
        self.lines: dict[int, Line] = {}
        self.num_starts = 0
        self.version = 0
        """Of the weights in the folder."""

    async def start(self, index: int) -> RemoteEngine:
        """End what is left of this one, and start it anew."""
        await self.end(index)
        self.num_starts += 1
        file = self._scratch / f"{index}-{self.num_starts}"
        process = CONTEXT.Process(
            target=serve, args=(str(self._folder), self.version, str(file)), daemon=True
        )
        process.start()
        self.processes[index] = process
        until = time.monotonic() + START_S
        while not file.exists():
            assert time.monotonic() < until
            assert process.is_alive(), "the process of an engine ended as it started"
            await asyncio.sleep(0.02)
        address = EngineAddress(**json.loads(file.read_text()))
        line = self.lines[index] = Line(address.port)
        address = dataclasses.replace(address, port=await line.open())
        return await RemoteEngine.connect(address, timeout_s=5.0)

    def harm(self, index: int, how: str) -> None:
        """kill, stop, half-open or garbage."""
        pid = self.processes[index].pid
        assert pid is not None
        match how:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "stop":
                os.kill(pid, signal.SIGSTOP)
            case "half-open":
                self.lines[index].go_dead()
            case "garbage":
                self.lines[index].say_nonsense()

    async def end(self, index: int) -> None:
        """End one."""
        if index in self.processes:
            self.processes[index].kill()  # also one that was stopped
            self.processes.pop(index).join(10)
        if index in self.lines:
            await self.lines.pop(index).close()

    async def __aexit__(self, *_: object) -> None:
        for index in list(self.processes):
            await self.end(index)
