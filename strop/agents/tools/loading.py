"""Tools of the YAML file and of the file with function tools."""

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
    """Import the code that both files name, without creating tools; arguments as of `load_all_tools`.

    Raises:
        ValueError: a file cannot be read or imported, or has no such class.
    """
    if tool_config_path:
        folder = Path(tool_config_path).expanduser().parent
        for number, entry in enumerate(_read_entries(tool_config_path), start=1):
            if not _is_server(entry):
                _class_of(entry, _entry_label(number, tool_config_path), folder)
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
        for tool in _create_all(entry, _entry_label(number, path), folder)
    ]


def _entry_label(number: int, path: str) -> str:
    return f"agent.tools: entry {number} of {path}"


def _read_entries(path: str) -> list[Mapping[str, Any]]:
    content = read_yaml(path, setting="agent.tools")
    entries = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(f"agent.tools: {path} must have the key `tools` with a list of tools")
    return entries


def _create_all(entry: Mapping[str, Any], label: str, folder: Path) -> list[BaseTool]:
    return mcp_tools(entry, label) if _is_server(entry) else [_create(entry, label, folder)]


def _is_server(entry: Mapping[str, Any]) -> bool:
    config = entry.get("config") or {}
    return config.get("type") == "mcp" or bool(config.get("use_mcp"))


def _class_of(entry: Mapping[str, Any], label: str, folder: Path) -> type[BaseTool]:
    unknown = set(entry) - {"class_name", "config", "tool_schema"}
    if unknown or "class_name" not in entry:
        problem = f"has the unknown key {sorted(unknown)[0]!r}" if unknown else "has no class_name"
        raise ValueError(f"{label} {problem}; a tool has class_name, config and tool_schema")
    tool_class = load_class(str(entry["class_name"]), setting=label, folder=folder)
    if not issubclass(tool_class, BaseTool):
        raise ValueError(f"{label}: {entry['class_name']} is no subclass of BaseTool")
    return tool_class


def _create(entry: Mapping[str, Any], label: str, folder: Path) -> BaseTool:
    tool_class = _class_of(entry, label, folder)
    config = dict(entry.get("config") or {})
    kind = config.get("type", "native")
    if kind != "native":
        raise ValueError(f"{label} has config.type {kind!r}; known: native, mcp")
    try:
        schema = entry.get("tool_schema")
        tool = tool_class(config, None if schema is None else OpenAIFunctionToolSchema.model_validate(schema))
    except Exception as error:
        raise ValueError(
            f"{label}: {entry['class_name']} cannot be made: {type(error).__name__}: {error}"
        ) from error
    return tool
