"""The tools of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.agents.tools.base import BaseTool
from strop.agents.tools.class_loading import load_class, read_yaml
from strop.agents.tools.functions import load_function_tools_from_path
from strop.agents.tools.mcp import mcp_tools
from strop.agents.tools.schemas import OpenAIFunctionToolSchema


def load_all_tools(
    tool_config_path: str | None = None, function_tool_path: str | None = None
) -> dict[str, BaseTool]:
    """Tools of a YAML file and of a file with function tools, by name.

    Raises:
        ValueError: a file cannot be read, or two tools have one name.
    """
    tools: dict[str, BaseTool] = {}
    if tool_config_path:
        for tool in load_tool_classes(tool_config_path):
            add_tool(tools, tool)
    if function_tool_path:
        for tool in load_function_tools_from_path(function_tool_path).values():
            add_tool(tools, tool)
    return tools


def load_tool_code(tool_config_path: str, function_tool_path: str) -> None:
    """Import what both files name, and make no tool of it yet; arguments as of `load_all_tools`.

    Raises:
        ValueError: a file cannot be read or imported, or has no such class.
    """
    if tool_config_path:
        folder = Path(tool_config_path).expanduser().parent
        for number, entry in enumerate(_read_entries(tool_config_path), start=1):
            if not _is_server(entry):
                _class_of(entry, _where(number, tool_config_path), folder)
    if function_tool_path:
        load_function_tools_from_path(function_tool_path)


def add_tool(tools: dict[str, BaseTool], tool: BaseTool) -> None:
    """Add one tool.

    Raises:
        ValueError: another one has its name.
    """
    if tools.setdefault(tool.name, tool) is not tool:
        raise ValueError(f"two tools are named {tool.name!r}; rename one of them")


def load_tool_classes(path: str) -> list[BaseTool]:
    """The tools of a YAML file with the key `tools`: entries of class_name, config and tool_schema, or of config
    with `type: mcp` and mcp, which may give several tools. Classes are looked for as of `load_class`.

    Raises:
        ValueError: the sentence names the entry.
    """
    entries = _read_entries(path)
    folder = Path(path).expanduser().parent
    return [
        tool
        for number, entry in enumerate(entries, start=1)
        for tool in _make_all(entry, _where(number, path), folder)
    ]


def _where(number: int, path: str) -> str:
    return f"agent.tools: entry {number} of {path}"


def _read_entries(path: str) -> list[Mapping[str, Any]]:
    read = read_yaml(path, setting="agent.tools")
    entries = read.get("tools") if isinstance(read, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(f"agent.tools: {path} must have the key `tools` with a list of tools")
    return entries


def _make_all(entry: Mapping[str, Any], where: str, folder: Path) -> list[BaseTool]:
    return mcp_tools(entry, where) if _is_server(entry) else [_make(entry, where, folder)]


def _is_server(entry: Mapping[str, Any]) -> bool:
    config = entry.get("config") or {}
    return config.get("type") == "mcp" or bool(config.get("use_mcp"))


def _class_of(entry: Mapping[str, Any], where: str, folder: Path) -> type[BaseTool]:
    unknown = set(entry) - {"class_name", "config", "tool_schema"}
    if unknown or "class_name" not in entry:
        wrong = f"has the unknown key {sorted(unknown)[0]!r}" if unknown else "has no class_name"
        raise ValueError(f"{where} {wrong}; a tool has class_name, config and tool_schema")
    found = load_class(str(entry["class_name"]), setting=where, folder=folder)
    if not issubclass(found, BaseTool):
        raise ValueError(f"{where}: {entry['class_name']} is no subclass of BaseTool")
    return found


def _make(entry: Mapping[str, Any], where: str, folder: Path) -> BaseTool:
    found = _class_of(entry, where, folder)
    config = dict(entry.get("config") or {})
    kind = config.get("type", "native")
    if kind != "native":
        raise ValueError(f"{where} has config.type {kind!r}; known: native, mcp")
    try:
        schema = entry.get("tool_schema")
        tool = found(config, None if schema is None else OpenAIFunctionToolSchema.model_validate(schema))
    except Exception as error:
        raise ValueError(
            f"{where}: {entry['class_name']} cannot be made: {type(error).__name__}: {error}"
        ) from error
    return tool


initialize_tools_from_config = load_tool_classes
"""verl's name."""
