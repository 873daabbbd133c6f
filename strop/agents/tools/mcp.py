"""Tools of MCP servers, over stdio or streamable HTTP, through the official package.

Concurrency: the connections of a process live on an event loop in a thread of their own, because they outlive the
loop of any one caller. A call is handed over to that loop and waited for with a deadline; when the waiting ends, the
call is cancelled there too. A server that died is an error for the one who called it, and is started again for the
next call, at most max_restarts times; after that its tools are unavailable, which ends the episodes that call them.
Servers end when the process ends or `close_servers` is called.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import json
import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.agents.background_loop import BackgroundLoop
from strop.agents.tools.base import BaseTool, ToolResponse, ToolUnavailable
from strop.agents.tools.schemas import OpenAIFunctionToolSchema
from strop.border import encodable, encodable_value, remember_named, storable
from strop.token_bucket import TokenBucket

logger = logging.getLogger(__name__)

CONNECT_S = 30.0
"""Longest wait for a server to start and list its tools, in seconds."""
PROBE_S = 2.0
"""Longest wait for a sign of life after a call that failed."""
_CLASSES_OF_THE_FIELD = ("", "MCPBaseTool", "MCPSearchTool")
"""Classes that entries may name although none is needed: they join the texts of a result, as is done here."""
CLOSE_S = 10.0
"""Longest wait for a server to end; it is killed after four of them."""


class McpServerGone(RuntimeError):
    """A server died in a call; the message names it."""


class McpServerUnavailable(ToolUnavailable):
    """A server cannot be reached or started again; the message names it."""


@dataclass(frozen=True, kw_only=True)
class McpServerConfig:
    """How a server is reached: by a command that speaks over stdio, or at a URL."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the few variables that a server gets: HOME, PATH and the like, no tokens of this process."""
    cwd: str = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent with each request."""
    timeout_s: float = 30.0
    """Longest wait for the answer to a call, in seconds."""
    max_restarts: int = 3
    """How often a server that died is started again, or connected to again."""
    rate_limit: float | None = None
    """Calls that start per second, in this process, after a burst of a second's worth; None: no limit."""

    def __post_init__(self) -> None:
        remember_named(self.env)
        remember_named(self.headers)
        if bool(self.command) == bool(self.url):
            raise ValueError(f"MCP server {self.name!r} needs either a command or a url, and not both")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"MCP server {self.name!r} has the url {self.url!r}; it begins with http:// or https://"
            )
        if self.rate_limit is not None and not 0 < self.rate_limit < math.inf:
            raise ValueError(
                f"MCP server {self.name!r} has the rate_limit {self.rate_limit}; it is a number of calls per second "
                f"above 0, or null for no limit"
            )
        if not self.timeout_s > 0 or self.max_restarts < 0:
            raise ValueError(
                f"MCP server {self.name!r} has timeout {self.timeout_s} and max_restarts {self.max_restarts}; use more "
                f"than 0 seconds, and at least 0 restarts"
            )


class McpServer:
    """A connection that is made when it is needed. Its coroutines run on the loop of `_Loop`."""

    def __init__(self, config: McpServerConfig) -> None:
        self.config = config
        self.num_failures = 0
        """Calls that found the server dead."""
        self.num_starts = 0
        self._client: Any = None
        self._life: asyncio.Task[None] | None = None
        self._end = asyncio.Event()
        self._lock = asyncio.Lock()
        self._bucket = TokenBucket(config.rate_limit)

    async def tools(self) -> list[Any]:
        """What the server offers.

        Raises:
            McpServerUnavailable: it cannot be reached.
        """
        client = await self._connected()
        found: list[Any] = []
        cursor = None
        for _ in range(100):  # pages
            page = await client.list_tools(cursor=cursor)
            found += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        return found

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """The result of one call, which waits for its turn under the rate limit; the wait is no part of timeout_s.

        Raises:
            McpServerGone: the server died on it.
            McpServerUnavailable: it cannot be reached.
            TimeoutError: there was no answer in time.
            RuntimeError: the server refused the call.
        """
        await self._bucket.take()
        client = await self._connected()
        try:
            async with asyncio.timeout(self.config.timeout_s):
                return await client.call_tool(name, dict(arguments))
        except TimeoutError:
            await self._bury_if_dead(client)
            raise TimeoutError(f"no answer within {self.config.timeout_s:g} s") from None
        except Exception as error:
            if await self._bury_if_dead(client):
                raise McpServerGone(f"the server {self.config.name!r} ended while it was called") from error
            raise RuntimeError(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        """End the connection, and the process of a server that was started."""
        life, self._life, self._client = self._life, None, None
        if life is not None:
            self._end.set()
            done, _ = await asyncio.wait([life], timeout=CLOSE_S)
            if not done:
                life.cancel()
                await asyncio.wait([life], timeout=CLOSE_S)

    async def _connected(self) -> Any:
        async with self._lock:
            if self._life is not None and not self._life.done() and self._client is not None:
                return self._client
            if self.num_starts > self.config.max_restarts:
                raise McpServerUnavailable(
                    f"the server {self.config.name!r} ended {self.num_starts} times and is not started again"
                )
            self.num_starts += 1
            self._end = asyncio.Event()
            ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._life = asyncio.create_task(self._live(ready))
            try:
                async with asyncio.timeout(CONNECT_S):
                    self._client = await asyncio.shield(ready)
            except TimeoutError:
                await self.close()
                raise McpServerUnavailable(
                    f"the server {self.config.name!r} did not answer within {CONNECT_S:g} s"
                ) from None
            return self._client

    async def _live(self, ready: asyncio.Future[Any]) -> None:
        """Hold the connection open, in one task from its beginning to its end."""
        from mcp import Client

        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
            try:
                async with self._transport_client(Client, said) as client:
                    if not ready.done():
                        ready.set_result(client)
                    await self._end.wait()
            except BaseException as error:  # told to the one who waits
                if not ready.done():
                    reason = _tail(said) or _innermost(error)
                    ready.set_exception(
                        McpServerUnavailable(
                            f"the server {self.config.name!r} could not be started: {reason}"
                        )
                    )
                    ready.exception()  # the waiter may be gone
                elif not self._end.is_set():
                    logger.warning("MCP server %s ended: %s", self.config.name, _tail(said) or error)
                if isinstance(error, asyncio.CancelledError):
                    raise

    def _transport_client(self, client: Any, said: Any) -> Any:
        config = self.config
        if config.url:
            from mcp.client.streamable_http import streamable_http_client

            if not config.headers:
                return client(config.url, cache=None)
            from mcp.shared._httpx_utils import create_mcp_http_client

            http = create_mcp_http_client(headers=dict(config.headers))
            return client(streamable_http_client(config.url, http_client=http), cache=None)
        from mcp.client.stdio import StdioServerParameters, stdio_client

        parameters = StdioServerParameters(
            command=config.command,
            args=list(config.args),
            env=dict(config.env) or None,
            cwd=config.cwd or None,
        )
        return client(stdio_client(parameters, errlog=said), cache=None)

    async def _bury_if_dead(self, client: Any) -> bool:
        """Whether the server is dead; the next call finds a fresh one then."""
        if client is not self._client:  # another call found out first
            return True
        is_dead = self._life is None or self._life.done()
        if not is_dead:
            try:
                async with asyncio.timeout(PROBE_S):
                    await client.list_tools()
            except Exception:  # noqa: BLE001 (whatever it is, there is no sign of life)
                is_dead = True
        if is_dead:
            self.num_failures += 1
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
        """As of BaseTool. What the tool itself calls an error is shown to the model as its result.

        Raises:
            McpServerGone: the server died in this call, which the model is told.
            McpServerUnavailable: it cannot be reached, which ends the episode.
        """

        async def call() -> Any:
            return await (await _loop.server(self.server)).call(self.name, parameters)

        result = await asyncio.wrap_future(_loop.submit(call()))
        response = read_result(result)
        return response, 0.0, {"is_error": True} if result.is_error else {}


def read_result(result: Any) -> ToolResponse:
    """The text and the images of a result; other contents are named."""
    texts: list[str] = []
    images: list[Any] = []
    for part in result.content:
        if part.type == "text":
            texts.append(part.text)
        elif part.type == "image":
            images.append(base64.b64decode(part.data))
        elif part.type == "resource" and getattr(part.resource, "text", None) is not None:
            texts.append(part.resource.text)
        else:
            texts.append(f"({part.type})")
    if not texts and not images and result.structured_content is not None:
        texts.append(json.dumps(storable(result.structured_content), ensure_ascii=False))
    return ToolResponse(text="\n".join(texts) or None, image=images or None)


def mcp_tools(entry: Mapping[str, Any], where: str) -> list[BaseTool]:
    """The tools of an entry of the YAML file: those that its servers offer, or the selected ones of them.

    The servers are started to ask them, and ended again.

    Args:
        entry: `config` (type: mcp, timeout, max_restarts, rate_limit) and `mcp`: mcp_servers_config_path (a JSON file
            with the key mcpServers), or one server by command, args, env, cwd or by url, headers; and
            tool_selected_list.
        where: names the entry in messages.

    Raises:
        ValueError: a server cannot be reached, or a selected tool is not there.
    """
    try:
        import mcp  # noqa: F401 (said early, with what to install)
    except ModuleNotFoundError as error:
        raise ValueError(f"{where} needs the mcp package: pip install 'strop[mcp]'") from error
    servers, selected = _read_entry(entry, where)

    async def offered() -> list[list[Any]]:
        made = [McpServer(config) for config in servers]
        try:
            return [await server.tools() for server in made]
        finally:
            await asyncio.gather(*(server.close() for server in made))

    try:
        found = _loop.submit(offered()).result(timeout=(CONNECT_S + CLOSE_S) * len(servers) + CLOSE_S)
    except (McpServerUnavailable, TimeoutError) as error:
        raise ValueError(f"{where}: {error}") from error
    tools: list[BaseTool] = []
    for config, offers in zip(servers, found, strict=True):
        tools += [
            McpTool(config, _schema(offer)) for offer in offers if selected is None or offer.name in selected
        ]
    names = {tool.name for tool in tools}
    if missing := [name for name in selected or () if name not in names]:
        known = ", ".join(sorted(offer.name for offers in found for offer in offers)) or "none"
        raise ValueError(f"{where} selects the tool {missing[0]!r}, but the servers offer {known}")
    return tools


def _read_entry(entry: Mapping[str, Any], where: str) -> tuple[list[McpServerConfig], Sequence[str] | None]:
    settings, given = dict(entry.get("config") or {}), dict(entry.get("mcp") or {})
    selected = given.pop("tool_selected_list", None)
    for key in ("type", "use_mcp"):  # how the entry was told apart
        settings.pop(key, None)
    for key in sorted(set(entry) - {"config", "mcp", "class_name"}):
        raise ValueError(f"{where} has the key {key!r}, but an MCP entry has config and mcp")
    if entry.get("class_name", "").rpartition(".")[2] not in _CLASSES_OF_THE_FIELD:
        raise ValueError(
            f"{where} has the class_name {entry['class_name']!r}, but a server's tools are called as they are: remove "
            f"it, or write a tool class of your own that calls the server"
        )
    try:
        rate = settings.pop("rate_limit", None)
        shared = {
            "timeout_s": float(settings.pop("timeout", 30.0)),
            "max_restarts": int(settings.pop("max_restarts", 3)),
            "rate_limit": None if rate is None else float(rate),
        }
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: timeout, max_restarts and rate_limit are numbers: {error}") from None
    if settings:
        raise ValueError(
            f"{where}: config has the unknown key {sorted(settings)[0]!r}; an MCP entry has type, timeout, "
            f"max_restarts and rate_limit"
        )
    path = given.pop("mcp_servers_config_path", None)
    if path is None:
        named = {str(given.pop("name", "mcp")): given}
    else:
        if given:
            raise ValueError(
                f"{where}: mcp has mcp_servers_config_path and {sorted(given)[0]!r}; give one of the two"
            )
        try:
            named = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))["mcpServers"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{where}: {path} cannot be read as JSON with the key mcpServers: {type(error).__name__}: {error}"
            ) from error
    return [_server(str(name), server, shared, where) for name, server in named.items()], selected


def _server(name: str, given: Mapping[str, Any], shared: Mapping[str, Any], where: str) -> McpServerConfig:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: MCP server {name!r} is {given!r:.60}, not an object")
    settings = {key: value for key, value in given.items() if key not in ("type", "transport")}
    token = settings.pop("auth_token", None)
    if token:
        settings["headers"] = {**settings.get("headers", {}), "Authorization": f"Bearer {token}"}
    if unknown := set(settings) - {"command", "args", "env", "cwd", "url", "headers"}:
        raise ValueError(
            f"{where}: MCP server {name!r} has the unknown key {sorted(unknown)[0]!r}; it has command, args, env, cwd, "
            f"or url, headers, auth_token"
        )
    settings["args"] = tuple(str(word) for word in settings.get("args", ()))
    try:
        return McpServerConfig(name=name, **settings, **shared)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _schema(offer: Any) -> OpenAIFunctionToolSchema:
    """How a prompt shows a tool of a server."""
    parameters = {"type": "object", "properties": {}, **encodable_value(offer.input_schema)}
    return OpenAIFunctionToolSchema.model_validate(
        {
            "type": "function",
            "function": {
                "name": offer.name,
                "description": encodable(offer.description or ""),
                "parameters": parameters,
            },
        }
    )


def _tail(said: Any) -> str:
    """The end of what a server wrote to its standard error."""
    said.seek(0)
    return encodable(str(said.read()))[-300:].strip()  # first without secrets, then cut


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
