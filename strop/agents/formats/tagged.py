"""Calls between tags: hermes (Qwen2.5, Qwen3), qwen3_coder, glm."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from strop.agents.formats.calls import (
    FunctionCall,
    MalformedCall,
    Read,
    ToolSchemas,
    call_from_json,
    parameter_types,
    typed_value,
)
from strop.agents.formats.parser import ToolFormat, formats

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)",
    re.DOTALL,
)
_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_NAME = re.compile(r"[\w.:-]+")


def _read_blocks(text: str, read: Callable[[str], FunctionCall | MalformedCall]) -> Read:
    """Every block between the tags; the text outside of them is the content."""
    content: list[str] = []
    calls: list[FunctionCall | MalformedCall] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        content.append(text[position:start])
        end = text.find(CLOSE, start)
        if end < 0:
            calls.append(
                MalformedCall(
                    text[start:], f"A tool call was opened with {OPEN} but not closed with {CLOSE}."
                )
            )
            position = len(text)
            break
        calls.append(read(text[start + len(OPEN) : end]))
        position = end + len(CLOSE)
    content.append(text[position:])
    return "".join(content).strip(), calls


def read_hermes(text: str, tools: ToolSchemas) -> Read:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    return _read_blocks(text, call_from_json)


def read_qwen3_coder(text: str, tools: ToolSchemas) -> Read:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

    def read(block: str) -> FunctionCall | MalformedCall:
        match = _FUNCTION.fullmatch(block)
        if match is None:
            return MalformedCall(block, "A tool call must be <function=NAME> ... </function>.")
        name = match[1].strip()
        types = parameter_types(tools, name)
        arguments = {
            key.strip(): typed_value(_without_edges(value), types.get(key.strip()))
            for key, value in _PARAMETER.findall(match[2])
        }
        return FunctionCall(name, json.dumps(arguments, ensure_ascii=False))

    return _read_blocks(text, read)


def read_glm(text: str, tools: ToolSchemas) -> Read:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

    def read(block: str) -> FunctionCall | MalformedCall:
        name, _, rest = block.partition("<arg_key>")
        name = name.strip()
        if not _NAME.fullmatch(name):
            return MalformedCall(block, "A tool call must begin with the name of a tool.")
        found = _GLM_ARGUMENT.findall("<arg_key>" + rest if rest else "")
        if len(found) != block.count("<arg_key>"):
            return MalformedCall(block, "Each <arg_key> needs an <arg_value> after it.", name)
        types = parameter_types(tools, name)
        arguments = {key.strip(): typed_value(value, types.get(key.strip())) for key, value in found}
        return FunctionCall(name, json.dumps(arguments, ensure_ascii=False))

    return _read_blocks(text, read)


def _without_edges(text: str) -> str:
    """Without the line breaks that the format puts around a value."""
    return text.removeprefix("\n").removesuffix("\n")


formats.add(
    ToolFormat(name="qwen3_coder", read=read_qwen3_coder),
    ToolFormat(
        name="glm",
        read=read_glm,
        stop_tokens=("<|observation|>", "<|user|>"),
    ),
    ToolFormat(name="hermes", read=read_hermes),
)
