"""Tools and tool calls of a conversation that the text of a chat template lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.data.chat import Chat


def check_tools_shown(chat: Chat, text: str) -> None:
    """Refuse a conversation of whose tools its text has nothing.

    Raises:
        ValueError: the template does not write them.
    """
    names = [name for tool in chat.tools or () if (name := _name_of(tool))]
    if names and not any(name in text for name in names):
        raise ValueError(
            f"{chat.where}: the chat template shows no tool of column 'tools': use a template that does, or describe "
            f"the tools in the system message and remove the column"
        )


def check_calls_shown(chat: Chat, text: str) -> None:
    """Refuse a conversation whose text has nothing of one of its tool calls.

    Raises:
        ValueError: the template does not write it.
    """
    for number, message in enumerate(chat.messages, start=1):
        if not writes_calls(message, text):
            raise ValueError(
                f"{chat.where}: the chat template leaves out the tool calls of message {number} "
                f"({message['role']}): use a template that writes them, or remove the row"
            )


def writes_calls(message: Mapping[str, Any], text: str) -> bool:
    """True if a text has all tool calls of a message, by the names of their functions or their own ids."""
    calls = [(_name_of(call), str(call.get("id") or "")) for call in message.get("tool_calls") or ()]
    return all(name in text or (call_id and call_id in text) for name, call_id in calls)


def _name_of(tool: object) -> str:
    """Name of a function in a schema or a call, with or without OpenAI's `function` around it; empty for none."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""
