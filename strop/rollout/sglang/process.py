"""SGLang's server: started on loopback with a token of its own, asked over HTTP, gone with its owner.

Concurrency: requests run in one background thread of the owner, so that any thread or loop may ask. Every wait has a
deadline, but for a generation, whose caller has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from strop.rollout.types import EngineDied
from strop.utils.background_loop import BackgroundLoop
from strop.utils.ports import free_port
from strop.utils.sanitize import described

INSIDE = Path(__file__).parent / "inside"
HOST = "127.0.0.1"
_LOOP = BackgroundLoop("strop: sglang")
TIMEOUT_S = 600.0
"""Limit of an answer, in seconds; the longest are those of an update of weights."""
_POLL_S = 0.5
_END_S = 20.0
"""Time for the processes to be gone after they were killed."""
_TAIL_LINES = 3
MAX_LINE_BYTES = 1 << 26
"""Of one event of a stream."""


class SglangDied(EngineDied):
    """SGLang's server has ended or does not answer; the message says what its log says."""


class SglangProcess:
    """One server."""

    def __init__(
        self, python: Path, arguments: Mapping[str, Any], *, log: Path, env: Mapping[str, str]
    ) -> None:
        """Start it; `wait` waits until it answers.

        Args:
            python: of SGLang's environment.
            arguments: of its server, but for host, port and key.
            log: file that takes what it prints.
            env: variables beside those of this process.
        """
        self.log = log
        self._is_closed = False
        self._key = secrets.token_urlsafe(32)
        port = free_port(HOST)
        self._url = f"http://{HOST}:{port}/"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [str(python), str(INSIDE / "launch.py")],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env={**os.environ, **env, "PYTHONPATH": str(INSIDE), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        line = json.dumps({**arguments, "host": HOST, "port": port, "api_key": self._key})
        assert self._process.stdin is not None, "it has a pipe"
        with contextlib.suppress(BrokenPipeError):  # it has ended already; `wait` says why
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()  # and stays open: its end is ours
        self._session: aiohttp.ClientSession = _LOOP.submit(self._open()).result()

    @property
    def pid(self) -> int:
        """Of the server, which leads a group of its own."""
        return self._process.pid

    async def wait(self, timeout_s: float) -> Mapping[str, Any]:
        """Facts of the server about its model, as soon as it answers.

        Raises:
            SglangDied: it ended, or did not answer in time.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    with contextlib.suppress(aiohttp.ClientError, SglangDied):
                        await self._on_loop(self._call("GET", "ready", None, _POLL_S * 10))
                        reply: Mapping[str, Any] = await self.get("model_info", timeout_s=timeout_s)
                        return reply
                    if self._process.poll() is not None:
                        raise SglangDied(self._gone("could not start"))
                    await asyncio.sleep(_POLL_S)
        raise SglangDied(
            self._gone(f"did not answer within rollout.sglang.start_timeout_s = {timeout_s:g} s")
        )

    async def get(self, path: str, *, timeout_s: float) -> Any:
        """Ask; errors as of `post`."""
        return await self._on_loop(self._call("GET", path, None, timeout_s))

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Tell it something; the answer.

        Raises:
            RuntimeError: it answered with an error, which the message has.
            SglangDied: it is gone.
            TimeoutError: no answer within TIMEOUT_S.
        """
        return await self._on_loop(self._call("POST", path, body, TIMEOUT_S))

    def post_now(self, path: str, body: Mapping[str, Any]) -> Any:
        """As `post`, for a thread."""
        return _LOOP.submit(self._call("POST", path, body, TIMEOUT_S)).result()

    async def stream(
        self, path: str, body: Mapping[str, Any], hear: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """Call `hear`, in the background thread, with each event that answers a request, to the last. Whoever is
        cancelled hangs up.

        Raises:
            RuntimeError: it answered with an error, or stopped midway.
            SglangDied: it is gone.
        """

        async def follow() -> None:
            async for event in self._events(path, body):
                hear(event)

        await self._on_loop(follow())

    def close(self) -> None:
        """End it and all that it started. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_END_S)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        _LOOP.submit(self._session.close()).result()

    async def _open(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            self._url,
            headers={"Authorization": f"Bearer {self._key}"},
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=MAX_LINE_BYTES,
        )

    async def _on_loop(self, work: Any) -> Any:
        return await asyncio.wrap_future(_LOOP.submit(work))

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s), self._session.request(method, path, json=body) as answer:
                return await self._checked(answer, path)
        except TimeoutError:
            raise TimeoutError(
                f"SGLang did not answer {path} within {timeout_s:g} s; its log is {self.log}"
            ) from None
        except aiohttp.ClientError as error:
            raise SglangDied(self._gone(f"does not answer {path} ({described(error)})")) from error

    async def _checked(self, answer: aiohttp.ClientResponse, path: str) -> Any:
        text = await answer.text()
        if answer.status >= 400:
            raise RuntimeError(f"SGLang answered {path} with {answer.status}: {text[:500]}")
        with contextlib.suppress(json.JSONDecodeError):
            reply = json.loads(text)
            if isinstance(reply, dict) and reply.get("success") is False:
                raise RuntimeError(f"SGLang refused {path}: {str(reply.get('message'))[:500]}")
            return reply
        return text

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        try:
            async with self._session.post(path, json=body) as answer:
                if answer.status >= 400:
                    await self._checked(answer, path)
                async for line in answer.content:
                    if not line.startswith(b"data: "):
                        continue
                    if (data := line[6:].strip()) == b"[DONE]":
                        return
                    yield json.loads(data)
        except (aiohttp.ClientError, json.JSONDecodeError) as error:
            raise SglangDied(self._gone(f"broke {path} off ({described(error)})")) from error
        raise SglangDied(self._gone(f"broke {path} off"))

    def _gone(self, failure: str) -> str:
        code = self._process.poll()
        ended = "" if code is None else f", its process has ended (exit code {code})"
        lines = (
            self.log.read_text(errors="replace").strip().splitlines()[-_TAIL_LINES:]
            if self.log.exists()
            else []
        )
        last_lines = f": {' / '.join(lines)[-500:]}" if code is not None and lines else ""
        return f"SGLang {failure}{ended}{last_lines}; its log is {self.log}"
