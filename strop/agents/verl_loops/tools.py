"""Tools as loops of mid-2025 call them: `create` gives the id alone, and `execute` a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from strop.agents.tools.base import BaseTool, ToolResponse
from strop.agents.tools.loading import load_tool_classes

_AS_OF_2025: ContextVar[bool] = ContextVar("strop_loop_of_2025", default=False)


class ToolOf2025:
    """A tool, whatever its own form, in that of mid-2025."""

    def __init__(self, tool: BaseTool) -> None:
        self._tool: Any = tool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tool, name)

    async def create(self, *args: Any, **kwargs: Any) -> str:
        """Begin an episode; the id for the other methods."""
        created = await self._tool.create(*args, **kwargs)
        return str(created[0] if isinstance(created, tuple) else created)

    async def execute(self, *args: Any, **kwargs: Any) -> tuple[str, float, dict[str, Any]]:
        """Carry out one call; its text, a reward for it, and facts about it."""
        response, reward, facts = await self._tool.execute(*args, **kwargs)
        return (response.text or "") if isinstance(response, ToolResponse) else response, reward, facts


@contextmanager
def as_of_2025(is_on: bool) -> Iterator[None]:
    """In here, `initialize_tools_from_config` gives tools in the form of mid-2025, or as they are."""
    token = _AS_OF_2025.set(is_on)
    try:
        yield
    finally:
        _AS_OF_2025.reset(token)


def initialize_tools_from_config(tools_config_file: str) -> list[Any]:
    """The tools of a YAML file, under verl's name; to a loop of mid-2025 in the form of that time.

    Raises:
        ValueError: the sentence names the entry of the file.
    """
    tools = load_tool_classes(tools_config_file)
    return [ToolOf2025(tool) for tool in tools] if _AS_OF_2025.get() else tools
