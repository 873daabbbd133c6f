"""Bounded transports of MCP servers.

A server is a program of somebody else. Endless output, one endless line, output that is no JSON, and standard error
cost a bounded amount of memory and end the connection with a sentence. It gets none of this process's
environment but a few harmless variables, and its whole process group ends with the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from strop.utils.sanitize import encodable

if TYPE_CHECKING:
    from mcp.shared.message import SessionMessage

MAX_MESSAGE_BYTES = 16 << 20
"""Of one message of a server."""
MAX_UNASKED_BYTES = 64 << 20
"""That a server may write between two requests."""
MAX_BAD_LINES = 100
"""Lines that are no message; servers that print to their standard output by mistake have a few."""
GRACE_S = 2.0
"""A server may take that long to end by itself, and again after SIGTERM."""
HTTP_CONNECT_S, HTTP_READ_S = 30.0, 300.0
"""A server at a URL may be silent that long: answers may be streams that stay open. Each call has its own deadline."""
_TAIL_BYTES = 4096
_CHUNK_BYTES = 1 << 16
_INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "USER")


class ServerOutput:
    """End of a server's standard error, and the reason why the connection was ended."""

    def __init__(self) -> None:
        self._tail = b""
        self.reason = ""
        self.bad_line = ""

    def add(self, data: bytes) -> None:
        """Keep the end of it."""
        self._tail = (self._tail + data)[-_TAIL_BYTES:]

    def __str__(self) -> str:
        tail = encodable(self._tail.decode("utf-8", errors="replace"))[-300:].strip()  # first without secrets
        return self.reason or tail or self.bad_line


@asynccontextmanager
async def stdio_transport(
    command: str, args: list[str], *, env: Mapping[str, str], cwd: str, output: ServerOutput
) -> AsyncIterator[Any]:
    """A server that is started and spoken to over its standard input and output: streams of messages in and out.

    Args:
        command, args: of the server.
        env: added to the few variables that every server gets.
        cwd: its working directory; empty: the current one.
        output: takes its standard error, and the reason why the connection ended.

    Raises:
        OSError: it could not be started.
    """
    import anyio  # both come with the optional package mcp
    from mcp.shared.message import SessionMessage

    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        command, *args, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, env={**inherited, **env}, cwd=cwd or None, start_new_session=True,
    )  # fmt: skip
    to_session, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, to_server = anyio.create_memory_object_stream[SessionMessage](0)
    reader = _Reader(process, output)
    tasks = [
        asyncio.create_task(reader.read(to_session)),
        asyncio.create_task(reader.write(to_server)),
        asyncio.create_task(reader.drain_errors()),
    ]
    try:
        yield received, outgoing
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.shield(asyncio.ensure_future(_end(process, tasks)))
        for stream in (to_session, received, outgoing, to_server):
            stream.close()


class _Reader:
    """The two directions of one server."""

    def __init__(self, process: asyncio.subprocess.Process, output: ServerOutput) -> None:
        self._process, self._output = process, output
        self._num_unrequested = self._bad_lines = 0

    async def read(self, to_session: Any) -> None:
        """Hand messages on until the server ends or misbehaves; the session sees the end of the stream then."""
        assert self._process.stdout is not None, "made with pipes"
        import anyio

        parts: list[bytes] = []
        size = 0
        with to_session, contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            while data := await self._process.stdout.read(_CHUNK_BYTES):
                self._num_unrequested += len(data)
                *lines, rest = data.split(b"\n")
                for line in lines:
                    message = self._message(b"".join([*parts, line]))
                    parts, size = [], 0
                    if message is not None:
                        await to_session.send(message)
                parts.append(rest)
                size += len(rest)
                if size > MAX_MESSAGE_BYTES:
                    self._output.reason = f"it wrote a message of more than {MAX_MESSAGE_BYTES >> 20} MiB"
                elif self._num_unrequested > MAX_UNASKED_BYTES:
                    self._output.reason = (
                        f"it wrote more than {MAX_UNASKED_BYTES >> 20} MiB without being asked"
                    )
                if self._output.reason:
                    return

    async def write(self, to_server: Any) -> None:
        """Send the messages of the session."""
        assert self._process.stdin is not None, "made with pipes"
        with contextlib.suppress(OSError):
            async for session_message in to_server:
                text = session_message.message.model_dump_json(by_alias=True, exclude_unset=True)
                self._num_unrequested = 0
                self._process.stdin.write(text.encode("utf-8", errors="backslashreplace") + b"\n")
                await self._process.stdin.drain()

    async def drain_errors(self) -> None:
        """Keep the end of the standard error, so that a server is never held up by it."""
        assert self._process.stderr is not None, "made with pipes"
        while data := await self._process.stderr.read(_CHUNK_BYTES):
            self._output.add(data)

    def _message(self, line: bytes) -> SessionMessage | None:
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        if not line.strip():
            return None
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
        except ValueError:
            self._bad_lines += 1
            line_start = ascii(line[:60].decode("utf-8", errors="replace"))
            self._output.bad_line = f"it wrote a line that is no message: {line_start}"
            if self._bad_lines > MAX_BAD_LINES:
                self._output.reason = (
                    f"it wrote more than {MAX_BAD_LINES} lines that are no messages, such as {line_start}"
                )
            return None


async def _end(process: asyncio.subprocess.Process, tasks: list[asyncio.Task[None]]) -> None:
    """Close the server's input, and end its process group if that is not enough; every wait is bounded."""
    await asyncio.gather(*tasks, return_exceptions=True)
    assert process.stdin is not None, "made with pipes"
    process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await _ended(process)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)  # also what it has left behind
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GRACE_S):
            await _ended(process)
    transport = getattr(process, "_transport", None)  # a child of the server may hold the pipes open
    if transport is not None:
        transport.close()


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Not process.wait(): that waits for the pipes too, which a child of the server may hold."""
    while process.returncode is None:
        await asyncio.sleep(0.01)


def bounded_http_client(headers: Mapping[str, str]) -> Any:
    """A client for a server at a URL: no answer is larger than MAX_UNASKED_BYTES, and none is compressed.

    Redirects stay within the server's own address (the package sees to it), so headers go nowhere else.
    """
    import httpx2  # comes with the optional package mcp

    class Bounded(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for data in self._stream:
                size += len(data)
                if size > MAX_UNASKED_BYTES:
                    raise httpx2.ReadError(f"the server sent more than {MAX_UNASKED_BYTES >> 20} MiB")
                yield data

        async def aclose(self) -> None:
            await self._stream.aclose()

    class Transport(httpx2.AsyncHTTPTransport):
        async def handle_async_request(self, request: Any) -> Any:
            response = await super().handle_async_request(request)
            if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
                await response.aclose()
                raise httpx2.ReadError("the server sent a compressed answer, which was not asked for")
            response.stream = Bounded(response.stream)
            return response

    return httpx2.AsyncClient(
        transport=Transport(),
        headers={"Accept-Encoding": "identity", **headers},
        timeout=httpx2.Timeout(HTTP_CONNECT_S, read=HTTP_READ_S),
        trust_env=False,  # no proxy and no password file of this user
    )
