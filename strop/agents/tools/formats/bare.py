"""Calls that are the whole answer, without tags: llama3_json, pythonic."""

from __future__ import annotations

import re

from strop.agents.tools.formats.calls import ParsedCalls, ToolSchemas, call_from_object
from strop.agents.tools.formats.parser import ToolFormat, add_formats
from strop.agents.tools.formats.pythonic import calls_in_list
from strop.agents.tools.parsed_output import FunctionCall, MalformedCall
from strop.utils.sanitize import read_json_at

_PYTHON_TAG = "<|python_tag|>"
_NAMED_OBJECT = re.compile(r'\{\s*"(?:name|type)"')
_PYTHONIC = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(.*\)\s*\]", re.DOTALL)
_PYTHONIC_MARKED = re.compile(
    r"<\|(?P<mark>python|tool_call)_start\|>(?P<calls>.*?)(?:<\|(?P=mark)_end\|>|\Z)", re.DOTALL
)


def read_llama3_json(text: str, tools: ToolSchemas) -> ParsedCalls:
    """`{"name": ..., "parameters": {...}}`, several divided by `;`, perhaps after <|python_tag|>."""
    content, tagged, rest = text.partition(_PYTHON_TAG)
    body = (rest if tagged else text).strip()
    if not tagged and not _NAMED_OBJECT.match(body):
        return text.strip(), []
    calls: list[FunctionCall | MalformedCall] = []
    position = 0
    while position < len(body):
        try:
            value, end = read_json_at(body, position)
        except ValueError as error:
            calls.append(MalformedCall(body[position:], f"Invalid JSON in tool call: {error}"))
            break
        written = body[position:end]
        calls.append(call_from_object(value, written, arguments_key="parameters"))
        position = end
        while position < len(body) and body[position] in "; \n\t,":
            position += 1
    if tagged and not calls:
        calls.append(MalformedCall(body, f"After {_PYTHON_TAG} must come a call as a JSON object."))
    return content.strip() if tagged else "", calls


def read_pythonic(text: str, tools: ToolSchemas) -> ParsedCalls:
    """`[name(key=value, ...), ...]` with literal values; read as text, never carried out.

    It is the whole answer, or stands between control tokens of its own (Llama 4, LFM2).
    """
    marked = _PYTHONIC_MARKED.search(text)
    content = (text[: marked.start()] + text[marked.end() :]).strip() if marked else ""
    body = (marked["calls"] if marked else text).strip()
    if not _PYTHONIC.fullmatch(body):
        if marked:
            return content, [MalformedCall(body, "Tool calls must be a list of calls name(key=value).")]
        return text.strip(), []
    return content, calls_in_list(body)


add_formats(
    ToolFormat(name="pythonic", read=read_pythonic),
    ToolFormat(name="llama3_json", read=read_llama3_json, stop_tokens=("<|eom_id|>",)),
)
