"""Calls that are the whole answer, without tags: llama3_json, pythonic."""

from __future__ import annotations

import ast
import json
import re

from strop.agents.formats.calls import FunctionCall, MalformedCall, Read, ToolSchemas, call_from_object
from strop.agents.formats.parser import ToolFormat, formats

_PYTHON_TAG = "<|python_tag|>"
_NAMED_OBJECT = re.compile(r'\{\s*"(?:name|type)"')
_PYTHONIC = re.compile(r"\[\s*[A-Za-z_][\w.]*\s*\(.*\)\s*\]", re.DOTALL)
_PYTHONIC_MARKED = re.compile(
    r"<\|(?P<mark>python|tool_call)_start\|>(?P<calls>.*?)(?:<\|(?P=mark)_end\|>|\Z)", re.DOTALL
)
_MAX_PYTHONIC_CHARS = 20_000
"""Longer ones are refused before they are parsed; the parser's memory grows with them."""


def read_llama3_json(text: str, tools: ToolSchemas) -> Read:
    """`{"name": ..., "parameters": {...}}`, several divided by `;`, perhaps after <|python_tag|>."""
    content, tagged, rest = text.partition(_PYTHON_TAG)
    body = (rest if tagged else text).strip()
    if not tagged and not _NAMED_OBJECT.match(body):
        return text.strip(), []
    calls: list[FunctionCall | MalformedCall] = []
    decoder = json.JSONDecoder()
    position = 0
    while position < len(body):
        try:
            value, end = decoder.raw_decode(body, position)
        except json.JSONDecodeError as error:
            calls.append(MalformedCall(body[position:], f"Invalid JSON in tool call: {error}"))
            break
        written = body[position:end]
        key = "parameters" if isinstance(value, dict) and "parameters" in value else "arguments"
        calls.append(call_from_object(value, written, arguments_key=key))
        position = end
        while position < len(body) and body[position] in "; \n\t,":
            position += 1
    if tagged and not calls:
        calls.append(MalformedCall(body, f"After {_PYTHON_TAG} must come a call as a JSON object."))
    return content.strip() if tagged else "", calls


def read_pythonic(text: str, tools: ToolSchemas) -> Read:
    """`[name(key=value, ...), ...]` with literal values; parsed as an expression, never carried out.

    It is the whole answer, or stands between control tokens of its own (Llama 4, LFM2).
    """
    marked = _PYTHONIC_MARKED.search(text)
    content = (text[: marked.start()] + text[marked.end() :]).strip() if marked else ""
    body = (marked["calls"] if marked else text).strip()
    if not _PYTHONIC.fullmatch(body):
        if marked:
            return content, [MalformedCall(body, "Tool calls must be a list of calls name(key=value).")]
        return text.strip(), []
    return content, _pythonic_calls(body)


def _pythonic_calls(body: str) -> list[FunctionCall | MalformedCall]:
    if len(body) > _MAX_PYTHONIC_CHARS:
        return [MalformedCall(body[:200], f"Tool calls have more than {_MAX_PYTHONIC_CHARS} characters.")]
    try:
        tree = ast.parse(body, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [MalformedCall(body, f"Tool calls are not valid Python: {error}")]
    if not isinstance(tree, ast.List):
        return [MalformedCall(body, "Tool calls must be a list of calls name(key=value).")]
    return [_pythonic_call(node, ast.get_source_segment(body, node) or body) for node in tree.elts]


def _pythonic_call(node: ast.expr, written: str) -> FunctionCall | MalformedCall:
    if not isinstance(node, ast.Call):
        return MalformedCall(written, "Each entry of the list must be a call name(key=value).")
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return MalformedCall(written, "Give every argument by its name: name(key=value).", name)
    try:
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        arguments = json.dumps(values, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return MalformedCall(written, "Arguments must be plain values.", name)
    return FunctionCall(name, arguments)


formats.add(
    ToolFormat(name="pythonic", read=read_pythonic),
    ToolFormat(name="llama3_json", read=read_llama3_json, stop_tokens=("<|eom_id|>",)),
)
