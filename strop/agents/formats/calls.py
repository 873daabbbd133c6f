"""What is read from an answer that may call tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FunctionCall:
    """A call that the model wrote, not yet checked against any tool."""

    name: str
    arguments: str
    """JSON text, as the model wrote it where its format is JSON."""
    tool_call_id: str | None = None


@dataclass(frozen=True)
class MalformedCall:
    """What begins as a call and is none; answered with the problem."""

    text: str
    """As written."""
    problem: str
    """A sentence for the model."""
    name: str = ""
    """Of the tool, where it can be read."""


@dataclass(frozen=True)
class ParsedTurn:
    """One answer in its parts."""

    content: str
    """Without thinking and calls."""
    calls: tuple[FunctionCall | MalformedCall, ...] = ()
    """In the order of the answer."""
    reasoning: str = ""
    """The thinking before the answer proper."""


Read = tuple[str, list[FunctionCall | MalformedCall]]
"""Content without calls, and the calls in order."""

ToolSchemas = Sequence[Mapping[str, Any]]

MAX_DEPTH = 100
"""Objects and lists within each other in what a model writes; far above any call, far below the interpreter's limit."""
_DECODER = json.JSONDecoder()


def read_json(text: str) -> Any:
    """The value of JSON text that a model wrote.

    Raises:
        ValueError: it is no JSON, is nested deeper than MAX_DEPTH, or has a number that is too long to be read. No text
            makes it raise anything else.
    """
    value, end = read_json_at(text, len(text) - len(text.lstrip(_BLANKS)))
    if text[end:].strip(_BLANKS):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def read_json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at a place of a text, and where it ends.

    Raises:
        ValueError: as of read_json.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except ValueError:
        raise ValueError("a number has more digits than can be read") from None
    if text.count("[", start, end) + text.count("{", start, end) > MAX_DEPTH:
        _check_depth(value)
    return value, end


_BLANKS = " \t\n\r"
_TOO_DEEP = f"objects and lists are nested more than {MAX_DEPTH} deep"


def _check_depth(value: object) -> None:
    """Refuse a value that is nested too deeply, level by level and not by recursion."""
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]


def call_from_json(text: str, *, arguments_key: str = "arguments") -> FunctionCall | MalformedCall:
    """A call that is a JSON object with a name and arguments, which may be an object or its JSON text."""
    try:
        value = read_json(text)
    except ValueError as error:
        return MalformedCall(text, f"Invalid JSON in tool call: {error}")
    return call_from_object(value, text, arguments_key=arguments_key)


def call_from_object(value: object, text: str, *, arguments_key: str) -> FunctionCall | MalformedCall:
    """A call from a value that was JSON; `text` is how it was written."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return MalformedCall(text, f'A tool call must be an object with "name" and "{arguments_key}".')
    arguments = value.get(arguments_key, {})
    identity = value.get("id")
    return FunctionCall(
        value["name"],
        arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
        identity if isinstance(identity, str) else None,
    )


def parameter_types(tools: ToolSchemas, name: str) -> Mapping[str, Any]:
    """JSON-schema type of each parameter of a tool; empty where it is not known."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: value.get("type") for key, value in properties.items() if isinstance(value, Mapping)}
    return {}


def typed_value(text: str, kind: Any) -> Any:
    """The value of a parameter that is written without quotes: a string stays one, all else is JSON if it can be.

    Args:
        text: as written.
        kind: JSON-schema type of the parameter; None where it is not known.
    """
    kinds = set(kind) if isinstance(kind, list) else {kind}
    if kinds == {"string"}:
        return text
    if "boolean" in kinds and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    try:
        value = read_json(text)
    except ValueError:
        return text
    return text if "string" in kinds and not isinstance(value, str | None) else value
