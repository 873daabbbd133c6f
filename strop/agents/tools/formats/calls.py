"""Calls from JSON and from parameters without quotes, as several formats write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from strop.agents.tools.parsed_output import FunctionCall, MalformedCall
from strop.utils.sanitize import read_json

ParsedCalls = tuple[str, list[FunctionCall | MalformedCall]]
"""Content without calls, and the calls in order."""

ToolSchemas = Sequence[Mapping[str, Any]]


ARGUMENT_KEYS = ("arguments", "parameters")
"""Keys under which a call in JSON has its arguments: that of OpenAI, Qwen and Mistral, and that of Llama."""


def call_from_json(text: str) -> FunctionCall | MalformedCall:
    """A call that is a JSON object with a name and arguments, which may be an object or its JSON text."""
    try:
        value = read_json(text)
    except ValueError as error:
        return MalformedCall(text, f"Invalid JSON in tool call: {error}")
    return call_from_object(value, text)


def call_from_object(
    value: object, text: str, *, arguments_key: str = "arguments"
) -> FunctionCall | MalformedCall:
    """A call from a value that was JSON; arguments are read under each of ARGUMENT_KEYS.

    A call with other keys and no arguments is malformed: carried out without them it would run with the defaults of
    the tool.

    Args:
        value: the call.
        text: as written.
        arguments_key: the key that the format has, for messages.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return MalformedCall(text, f'A tool call must be an object with "name" and "{arguments_key}".')
    name = value["name"]
    keys = [key for key in ARGUMENT_KEYS if key in value]
    if len(keys) > 1:
        return MalformedCall(text, f'A tool call has "{keys[0]}" or "{keys[1]}", not both.', name)
    arguments = value[keys[0]] if keys else {}
    other_keys = [key for key in value if key not in ("name", "id", "type", *ARGUMENT_KEYS)]
    if other_keys and arguments in ({}, "", "{}", None):
        problem = (
            f'A tool call has its arguments under "{arguments_key}", not under {json.dumps(other_keys[0])}.'
        )
        return MalformedCall(text, problem, name)
    identity = value.get("id")
    return FunctionCall(
        name,
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


def typed_value(text: str, kind: object) -> Any:
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
