"""The process that owns vLLM's engine, and the messages to it.

The two talk over a pair of sockets that has no address, so nobody else can. The process ends with its owner, however
that ends, and takes vLLM's own processes with it; what it prints goes to a log.

Concurrency: messages are written and heard in one background thread of the owner, so that any thread or loop may ask,
and a process that ended is noticed at once. Every question has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from strop.rollout.types import EngineDied
from strop.utils.background_loop import BackgroundLoop

INSIDE = Path(__file__).parent / "inside"
MAX_LINE_BYTES = 1 << 30
PARENT = "STROP_PARENT"
"""Variable of inside/strop_parent.py."""
_LOOP = BackgroundLoop("strop: vllm")
_END_S = 20.0
"""Time for the processes to be gone after they were killed."""
_TAIL_BYTES = 65536

Hear = Callable[[Mapping[str, Any]], None]
"""Takes what is told before the answer; called in the background thread."""


class VllmDied(EngineDied):
    """The process that owns vLLM's engine has ended; the message says what its log says."""


class ServerProcess:
    """One process in vLLM's environment."""

    def __init__(self, python: Path, *, log: Path, env: Mapping[str, str]) -> None:
        """Start it; nothing is loaded yet.

        Args:
            python: of vLLM's environment.
            log: file that takes what it prints.
            env: variables beside those of this process.
        """
        self.log = log
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[asyncio.Future[Any], Hear | None]] = {}
        self._ended = ""
        """Reason for which nothing can be asked any more."""
        ours, theirs = socket.socketpair()
        self._log_start = log.stat().st_size if log.exists() else 0
        with theirs:
            self._process = launch(python, "server.py", log=log, env=env, descriptor=theirs.fileno())
        self._writer: asyncio.StreamWriter
        _LOOP.submit(self._open(ours)).result()

    @property
    def pid(self) -> int:
        """Of the process, which leads a group of its own."""
        return self._process.pid

    async def ask(
        self, do: str, *, timeout_s: float | None = None, hear: Hear | None = None, **fields: Any
    ) -> Any:
        """The answer, for any loop. Whoever is cancelled ends the wait, not the work.

        Args:
            do: what, in words of inside/server.py.
            timeout_s: limit, in seconds; None where whoever asks has one.
            hear: takes what is told on the way.
            fields: of the message.

        Raises:
            ValueError: vLLM cannot do this.
            VllmDied: the process has ended.
            TimeoutError: no answer in time.
        """
        return await asyncio.wrap_future(self._submit(do, timeout_s, hear, fields))

    def ask_now(self, do: str, *, timeout_s: float, **fields: Any) -> Any:
        """As `ask`, for a thread."""
        return self._submit(do, timeout_s, None, fields).result()

    def tell(self, do: str, **fields: Any) -> None:
        """As `ask`, where nobody waits for the answer."""
        self._submit(do, None, None, fields)

    def end_because(self, reason: str) -> None:
        """End it and all that it started, for this reason: every wait ends with it."""
        self._ended = self._ended or reason
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it and all that it started. A second call does nothing."""
        self.end_because("it was closed")
        self._process.wait(_END_S)
        _LOOP.submit(self._hang_up()).result()

    def _submit(
        self, do: str, timeout_s: float | None, hear: Hear | None, fields: Mapping[str, Any]
    ) -> Future[Any]:
        return _LOOP.submit(self._ask(do, timeout_s, hear, fields))

    async def _ask(
        self, do: str, timeout_s: float | None, hear: Hear | None, fields: Mapping[str, Any]
    ) -> Any:
        if self._ended:
            raise VllmDied(f"vLLM cannot {do}: {self._ended}")
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (future, hear)
        self._writer.write(json.dumps({"n": number, "do": do, **fields}).encode() + b"\n")
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                return await future
        except TimeoutError:
            if not deadline.expired():
                raise
            raise TimeoutError(
                f"vLLM did not answer `{do}` within {timeout_s:g} s; its log is {self.log}"
            ) from None
        finally:
            del self._waiting[number]

    async def _open(self, sock: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=sock, limit=MAX_LINE_BYTES)
        self._listener = asyncio.create_task(self._listen(reader))

    async def _hang_up(self) -> None:
        self._writer.close()
        self._listener.cancel()
        self._fail()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._take(json.loads(line))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what it has started
        code = await asyncio.to_thread(self._process.wait)
        cause = last_error(self.log, self._log_start)
        self._ended = self._ended or f"its process has ended (exit code {code}){cause}; its log is {self.log}"
        self._fail()

    def _take(self, message: Mapping[str, Any]) -> None:
        future, hear = self._waiting.get(message["n"], (None, None))
        if future is None or future.done():
            return  # nobody waits for it any more
        if "tokens" in message:
            assert hear is not None, "only generation is told on the way"
            hear(message)
        elif "error" in message:
            kind = ValueError if message["bad"] else RuntimeError
            future.set_exception(kind(f"vLLM: {message['error']}"))
        else:
            future.set_result(message["result"])

    def _fail(self) -> None:
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(VllmDied(f"vLLM is gone: {self._ended}"))


def launch(
    python: Path,
    script: str,
    *,
    log: Path,
    env: Mapping[str, str],
    descriptor: int | None = None,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """A process in vLLM's environment that leads a group of its own, and ends with this one.

    Args:
        python: of the environment.
        script: file of inside/.
        log: file that takes what it prints.
        env: variables beside those of this process.
        descriptor: open file that it inherits; its number is the argument of the script.
        stdin: as of Popen.
    """
    descriptors = () if descriptor is None else (descriptor,)
    with log.open("ab") as out:
        return subprocess.Popen(
            [str(python), str(INSIDE / script), *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=stdin,
            stdout=out,
            stderr=out,
            env={
                **os.environ,
                **env,
                "PYTHONPATH": str(INSIDE),
                "PYTHONUNBUFFERED": "1",
                PARENT: str(os.getpid()),
            },
            start_new_session=True,
        )


_ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b: .+)$")


def last_error(log: Path, start: int) -> str:
    """The last error in the log since a place, as an addition to a sentence; "" without one."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        messages = [match[1] for line in lines if (match := _ERROR.search(line))]
        # What led to the others stands first.
        message = next((text for text in messages if "Engine core initialization failed" not in text), None)
        return f": {message[:500]}" if message else ""
    return ""
