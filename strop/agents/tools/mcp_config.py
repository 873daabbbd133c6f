"""Entries for MCP servers in the YAML file of tools, and checks of their tools."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.agents.tools.schemas import OpenAIFunctionToolSchema
from strop.utils.safe_read import read_json
from strop.utils.sanitize import encodable, encodable_value, remember_named

MAX_TOOLS = 1000
"""Most tools of one server."""
MAX_SCHEMA_CHARS = 32_000
"""Of the JSON of one tool, which becomes part of every prompt."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_CLASSES_OF_THE_FIELD = ("", "MCPBaseTool", "MCPSearchTool")
"""Classes that entries may name although none is needed: they join the texts of a result, as is done here."""


@dataclass(frozen=True, kw_only=True)
class McpServerConfig:
    """Connection settings of a server: a command that speaks over stdio, or a URL."""

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
    """Most retries in a row of a start, or a connection, that failed."""
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


def read_entry(entry: Mapping[str, Any], label: str) -> tuple[list[McpServerConfig], Sequence[str] | None]:
    """Servers of an entry, and the names of the selected tools; None for all.

    Raises:
        ValueError: the sentence names the entry.
    """
    settings, mcp = dict(entry.get("config") or {}), dict(entry.get("mcp") or {})
    selected = mcp.pop("tool_selected_list", None)
    for key in ("type", "use_mcp"):  # they mark the entry as one of MCP
        settings.pop(key, None)
    for key in sorted(set(entry) - {"config", "mcp", "class_name"}):
        raise ValueError(f"{label} has the key {key!r}, but an MCP entry has config and mcp")
    if entry.get("class_name", "").rpartition(".")[2] not in _CLASSES_OF_THE_FIELD:
        raise ValueError(
            f"{label} has the class_name {entry['class_name']!r}, but a server's tools are called as they are: remove "
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
        raise ValueError(f"{label}: timeout, max_restarts and rate_limit are numbers: {error}") from None
    if settings:
        raise ValueError(
            f"{label}: config has the unknown key {sorted(settings)[0]!r}; an MCP entry has type, timeout, "
            f"max_restarts and rate_limit"
        )
    path = mcp.pop("mcp_servers_config_path", None)
    if path is None:
        servers = {str(mcp.pop("name", "mcp")): mcp}
    else:
        if mcp:
            raise ValueError(
                f"{label}: mcp has mcp_servers_config_path and {sorted(mcp)[0]!r}; give one of the two"
            )
        try:
            servers = read_json(Path(path).expanduser())["mcpServers"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{label}: {path} cannot be read as JSON with the key mcpServers: {type(error).__name__}: {error}"
            ) from error
    return [_server(str(name), server, shared, label) for name, server in servers.items()], selected


def _server(name: str, entry: Mapping[str, Any], shared: Mapping[str, Any], label: str) -> McpServerConfig:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{label}: MCP server {name!r} is {entry!r:.60}, not an object")
    settings = {key: value for key, value in entry.items() if key not in ("type", "transport")}
    token = settings.pop("auth_token", None)
    if token:
        settings["headers"] = {**settings.get("headers", {}), "Authorization": f"Bearer {token}"}
    if unknown := set(settings) - {"command", "args", "env", "cwd", "url", "headers"}:
        raise ValueError(
            f"{label}: MCP server {name!r} has the unknown key {sorted(unknown)[0]!r}; it has command, args, env, cwd, "
            f"or url, headers, auth_token"
        )
    settings["args"] = tuple(str(word) for word in settings.get("args", ()))
    try:
        return McpServerConfig(name=name, **settings, **shared)
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None


def schema_of(offer: Any, server: str) -> OpenAIFunctionToolSchema:
    """Schema of a server's tool, for prompts.

    Raises:
        ValueError: its name or schema is invalid.
    """
    if not _NAME.fullmatch(offer.name):
        raise ValueError(
            f"the server {server!r} offers a tool with the name {ascii(offer.name)[:80]}; a name has up to 128 "
            f"letters, digits and _ . : / -"
        )
    parameters = {"type": "object", "properties": {}, **encodable_value(offer.input_schema)}
    function = {
        "name": offer.name,
        "description": encodable(offer.description or ""),
        "parameters": parameters,
    }
    size = len(json.dumps(function, ensure_ascii=False))
    if size > MAX_SCHEMA_CHARS:
        raise ValueError(
            f"the tool {offer.name!r} of the server {server!r} has a schema of {size} characters, more than "
            f"{MAX_SCHEMA_CHARS}: leave it out with tool_selected_list"
        )
    properties, required = parameters["properties"], parameters.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise ValueError(f"the tool {offer.name!r} of the server {server!r} has a schema that is none")
    try:
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    except ValueError as error:
        raise ValueError(f"the tool {offer.name!r} of the server {server!r}: {error}") from error
