"""Tools of MCP servers, over stdio or streamable HTTP, through the official package.

Concurrency: the connections of a process live on an event loop in a thread of their own, because they outlive the
loop of any one caller. A call is handed over to that loop and waited for with a deadline; when the waiting ends, the
call is cancelled there too. A server that died is an error of that call, whose arguments may be the cause, and
is started again for the next call, however often. One that cannot be started max_restarts + 1 times in a row has been
given nothing that could be why: its tools are unavailable, which ends the episodes that call them. Servers end when
the process ends or `close_servers` is called.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import json
import logging
from collections.abc import Mapping
from typing import Any

from strop.agents.tools.base import BaseTool, ToolResponse, ToolUnavailable
from strop.agents.tools.mcp_config import MAX_TOOLS, McpServerConfig, read_entry, schema_of
from strop.agents.tools.mcp_transport import ServerOutput, bounded_http_client, stdio_transport
from strop.agents.tools.schemas import OpenAIFunctionToolSchema
from strop.utils.background_loop import BackgroundLoop
from strop.utils.sanitize import encodable, storable
from strop.utils.token_bucket import TokenBucket
from strop.utils.trust import ask

logger = logging.getLogger(__name__)

CONNECT_S = 30.0
"""Longest wait for a server to start and list its tools, in seconds."""
PROBE_S = 2.0
"""Longest wait for a sign of life after a call that failed."""
RESTART_S = 2.0
"""Wait before a start after one that failed, times those that failed in a row."""
CLOSE_S = 10.0
"""Longest wait for a server to end; it is killed after four of them."""


class McpServerGone(RuntimeError):
    """A server died in a call, or does not start this time; the message names it."""


class McpServerUnavailable(ToolUnavailable):
    """A server cannot be reached or started; the message names it."""


class McpServer:
    """A connection that is made when it is needed. Its coroutines run on the loop of `_Loop`."""

    def __init__(self, config: McpServerConfig) -> None:
        self.config = config
        self.num_failed_starts = 0
        """In a row."""
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self._end = asyncio.Event()
        self._lock = asyncio.Lock()
        self._bucket = TokenBucket(config.rate_limit)
        self._output = ServerOutput()

    async def tools(self) -> list[Any]:
        """List the server's tools.

        Raises:
            McpServerUnavailable: it cannot be reached.
        """
        client = await self._connect()
        tools: list[Any] = []
        cursor = None
        try:
            async with asyncio.timeout(CONNECT_S):
                while len(tools) <= MAX_TOOLS:
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    if page.next_cursor is None and len(tools) <= MAX_TOOLS:
                        return tools
                    cursor = page.next_cursor
        except Exception as error:
            raise McpServerUnavailable(
                f"the server {self.config.name!r} did not list its tools: {self._reason(error)}"
            ) from error
        raise McpServerUnavailable(f"the server {self.config.name!r} offers more than {MAX_TOOLS} tools")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The result of one call, which waits for its turn under the rate limit; the wait is no part of timeout_s.

        Raises:
            McpServerGone: the server died on it, or could not be started for it.
            McpServerUnavailable: it could not be started max_restarts + 1 times in a row.
            TimeoutError: there was no answer in time.
            RuntimeError: the server refused the call.
        """
        await self._bucket.take()
        try:
            client = await self._connect()
        except McpServerUnavailable as error:
            if self.num_failed_starts > self.config.max_restarts:
                raise
            raise McpServerGone(str(error)) from error  # an earlier call may be the cause
        try:
            async with asyncio.timeout(self.config.timeout_s):
                return await client.call_tool(name, dict(arguments))
        except TimeoutError:
            await self._close_if_dead(client)
            raise TimeoutError(f"no answer within {self.config.timeout_s:g} s") from None
        except Exception as error:
            if await self._close_if_dead(client):
                reason = f": {self._output.reason}" if self._output.reason else ""
                raise McpServerGone(
                    f"the server {self.config.name!r} ended while it was called{reason}"
                ) from error
            raise RuntimeError(_short(str(error)) or type(error).__name__) from error

    async def close(self) -> None:
        """End the connection, and the process of a server that was started."""
        task, was_ready = self._task, self._client is not None
        self._task = self._client = None
        if task is not None:
            self._end.set()
            ended, _ = await asyncio.wait([task], timeout=CLOSE_S if was_ready else 0)
            if not ended:
                if not task.cancelling():  # a second time would break off the ending of the process
                    task.cancel()
                await asyncio.wait([task], timeout=CLOSE_S)

    async def _connect(self) -> Any:
        """A connection, started if need be.

        Raises:
            McpServerUnavailable: it cannot be.
        """
        async with self._lock:
            if self._task is not None and not self._task.done() and self._client is not None:
                return self._client
            if self.num_failed_starts > self.config.max_restarts:
                raise McpServerUnavailable(
                    f"the server {self.config.name!r} could not be started {self.num_failed_starts} times in a row "
                    f"and is not started again"
                )
            await asyncio.sleep(self.num_failed_starts * RESTART_S)
            try:
                self._client = await self._start()
            except McpServerUnavailable:
                self.num_failed_starts += 1
                raise
            self.num_failed_starts = 0
            return self._client

    async def _start(self) -> Any:
        self._end = asyncio.Event()
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        task = self._task = asyncio.create_task(self._live(ready))
        try:
            async with asyncio.timeout(CONNECT_S):
                return await asyncio.shield(ready)
        except BaseException as error:  # also of a caller who waits no longer
            task.cancel()
            await asyncio.wait([task], timeout=CLOSE_S)
            if isinstance(error, TimeoutError):
                raise McpServerUnavailable(
                    f"the server {self.config.name!r} did not answer within {CONNECT_S:g} s"
                ) from None
            raise

    async def _live(self, ready: asyncio.Future[Any]) -> None:
        """Hold the connection open, in one task from its beginning to its end."""
        from mcp import Client

        self._output = ServerOutput()
        try:
            async with self._transport_client(Client) as client:
                if not ready.done():
                    ready.set_result(client)
                await self._end.wait()
        except BaseException as error:  # told to the one who waits
            if not ready.done():
                ready.set_exception(
                    McpServerUnavailable(
                        f"the server {self.config.name!r} could not be started: {self._reason(error)}"
                    )
                )
                ready.exception()  # the waiter may be gone
            elif not self._end.is_set():
                logger.warning("MCP server %s ended: %s", self.config.name, self._reason(error))
            if isinstance(error, asyncio.CancelledError):
                raise

    def _reason(self, error: BaseException) -> str:
        return _short(str(self._output) or _innermost(error))

    def _transport_client(self, client: Any) -> Any:
        config = self.config
        if config.url:
            from mcp.client.streamable_http import streamable_http_client

            http = bounded_http_client(config.headers)
            return client(streamable_http_client(config.url, http_client=http), cache=None)
        transport = stdio_transport(
            config.command, list(config.args), env=config.env, cwd=config.cwd, output=self._output
        )
        return client(transport, cache=None)

    async def _close_if_dead(self, client: object) -> bool:
        """True when the server is dead; it is closed then, and the next call starts a new one."""
        if client is not self._client:  # another call found out first
            return True
        is_dead = self._task is None or self._task.done()
        if not is_dead:
            try:
                async with asyncio.timeout(PROBE_S):
                    await client.list_tools()
            except Exception:  # noqa: BLE001 (whatever it is, there is no sign of life)
                is_dead = True
        if is_dead:
            async with self._lock:
                if client is self._client:
                    await self.close()
        return is_dead


class _Loop(BackgroundLoop):
    """The event loop of all connections of this process."""

    def __init__(self) -> None:
        super().__init__("mcp servers")
        self.servers: list[McpServer] = []

    def begin(self) -> None:
        """A child process has no connections."""
        self.servers = []

    async def server(self, config: McpServerConfig) -> McpServer:
        """The one connection of this process to a server; runs on the loop."""
        for server in self.servers:
            if server.config == config:
                return server
        self.servers.append(McpServer(config))
        return self.servers[-1]

    async def close_all(self) -> None:
        """End every connection."""
        servers, self.servers = self.servers, []
        await asyncio.gather(*(server.close() for server in servers), return_exceptions=True)

    def close(self) -> None:
        """End every connection, from any thread."""
        if self.is_running:
            self.submit(self.close_all()).result(timeout=3 * CLOSE_S)


_loop = _Loop()
close_servers = _loop.close
"""End the connections of this process and the servers that it started; they are started again when needed."""
atexit.register(close_servers)


class McpTool(BaseTool):
    """One tool of a server."""

    def __init__(self, server: McpServerConfig, tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__({"type": "mcp", "server": server.name}, tool_schema)
        self.server = server

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """As of BaseTool. An error that the tool itself reports is shown to the model as its result.

        Raises:
            McpServerGone: as of McpServer.call, which the model is told.
            McpServerUnavailable: as there, which ends the episode.
        """

        async def call() -> Any:
            return await (await _loop.server(self.server)).call(self.name, parameters)

        result = await asyncio.wrap_future(_loop.submit(call()))
        response = read_result(result)
        return response, 0.0, {"is_error": True} if result.is_error else {}


def read_result(result: Any) -> ToolResponse:
    """The text, images and sound of a result; other contents are named."""
    texts: list[str] = []
    images: list[Any] = []
    audio: list[Any] = []
    for part in result.content:
        if part.type == "text":
            texts.append(part.text)
        elif part.type == "image":
            images.append(base64.b64decode(part.data))
        elif part.type == "audio":
            audio.append(part.mime_type)  # it goes no further
        elif part.type == "resource" and getattr(part.resource, "text", None) is not None:
            texts.append(part.resource.text)
        else:
            texts.append(f"({part.type})")
    if not texts and not images and not audio and result.structured_content is not None:
        texts.append(json.dumps(storable(result.structured_content), ensure_ascii=False))
    return ToolResponse(text="\n".join(texts) or None, image=images or None, audio=audio or None)


def mcp_tools(entry: Mapping[str, Any], label: str) -> list[BaseTool]:
    """The tools of an entry of the YAML file: those that its servers offer, or the selected ones of them.

    The servers are started to ask them, and ended again.

    Args:
        entry: `config` (type: mcp, timeout, max_restarts, rate_limit) and `mcp`: mcp_servers_config_path (a JSON file
            with the key mcpServers), or one server by command, args, env, cwd or by url, headers; and
            tool_selected_list.
        label: names the entry in messages.

    Raises:
        ValueError: a server cannot be reached, or a selected tool is not there.
    """
    try:
        import mcp  # noqa: F401 (said early, with what to install)
    except ModuleNotFoundError as error:
        raise ValueError(f"{label} needs the mcp package: pip install 'strop[mcp]'") from error
    servers, selected = read_entry(entry, label)
    for server in servers:
        ask(label, server.url or " ".join((server.command, *server.args)))

    async def offered() -> list[list[Any]]:
        connections = [McpServer(config) for config in servers]
        try:
            return [await server.tools() for server in connections]
        finally:
            await asyncio.gather(*(server.close() for server in connections))

    try:
        offers_of_servers = _loop.submit(offered()).result(
            timeout=(CONNECT_S + CLOSE_S) * len(servers) + CLOSE_S
        )
    except (McpServerUnavailable, TimeoutError) as error:
        raise ValueError(f"{label}: {error}") from error
    tools: list[BaseTool] = []
    for config, offers in zip(servers, offers_of_servers, strict=True):
        # ValueError of a schema names tool and server
        tools += [
            McpTool(config, schema_of(offer, config.name))
            for offer in offers
            if selected is None or offer.name in selected
        ]
    names = {tool.name for tool in tools}
    if missing := [name for name in selected or () if name not in names]:
        names_offered = (
            ", ".join(sorted(offer.name for offers in offers_of_servers for offer in offers)) or "none"
        )
        raise ValueError(
            f"{label} selects the tool {missing[0]!r}, but the servers offer {_short(names_offered)}"
        )
    return tools


def _short(text: str) -> str:
    """One line of a sentence."""
    line = " ".join(encodable(text)[:1000].split())  # first without secrets, then cut
    return line if len(line) <= 300 else f"{line[:300]}…"


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
