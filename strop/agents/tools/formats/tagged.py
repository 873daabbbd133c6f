"""Calls between tags: hermes (Qwen2.5, Qwen3), qwen3_coder, glm."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence

from strop.agents.tools.formats.calls import (
    ParsedCalls,
    ToolSchemas,
    call_from_json,
    parameter_types,
    typed_value,
)
from strop.agents.tools.formats.parser import ToolFormat, add_formats
from strop.agents.tools.formats.scanning import Marks, without_end
from strop.agents.tools.parsed_output import FunctionCall, MalformedCall
from strop.utils.sanitize import read_json_at

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[\w.:-]+")
_TAG_NAME = re.compile(r"[^\s<>]+")


def _read_blocks(
    text: str,
    read_block: Callable[[str], FunctionCall | MalformedCall],
    find_end: Callable[[str, int], int] = lambda text, start: text.find(CLOSE, start),
) -> ParsedCalls:
    """Every block between the tags; the text outside of them is the content.

    Args:
        text: of an answer.
        read_block: reads the text between two tags.
        find_end: place of the closing tag of the block that begins there; -1 where none does.
    """
    content: list[str] = []
    calls: list[FunctionCall | MalformedCall] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        content.append(text[position:start])
        end = find_end(text, start + len(OPEN))
        if end < 0:
            calls.append(
                MalformedCall(
                    text[start:], f"A tool call was opened with {OPEN} but not closed with {CLOSE}."
                )
            )
            position = len(text)
            break
        calls.append(read_block(text[start + len(OPEN) : end]))
        position = end + len(CLOSE)
    content.append(text[position:])
    if not calls and CLOSE in text:  # whoever forgets the beginning means a call all the same
        problem = f"A tool call was closed with {CLOSE} but not opened with {OPEN}."
        return "", [MalformedCall(text, problem)]
    return "".join(content).strip(), calls


def read_hermes(text: str, tools: ToolSchemas) -> ParsedCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    return _read_blocks(text, call_from_json, _end_of_json)


def _end_of_json(text: str, start: int) -> int:
    """Place of the next tag, behind the JSON value that begins there, whose texts may spell the tag out."""
    with contextlib.suppress(ValueError):
        _, start = read_json_at(text, Marks(text).skip_blanks(start))
    return text.find(CLOSE, start)


def read_qwen3_coder(text: str, tools: ToolSchemas) -> ParsedCalls:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

    def read_block(block: str) -> FunctionCall | MalformedCall:
        written, closed, body = block.lstrip().removeprefix(_FUNCTION).partition(">")
        name = written.strip()
        is_tag = block.lstrip().startswith(_FUNCTION) and closed and "\n" not in written
        if not (is_tag and _TAG_NAME.fullmatch(name)):
            return MalformedCall(block, "A tool call must be <function=NAME> ... </function>.")
        pairs, other_text = _parameters(without_end(body, _FUNCTION_END))
        if other_text:
            problem = "Each argument of a tool call must be <parameter=KEY>VALUE</parameter>."
            return MalformedCall(block, problem, name)
        if repeated := _repeated_key(pairs):
            return MalformedCall(block, f"The argument {json.dumps(repeated)} is given twice.", name)
        types = parameter_types(tools, name)
        arguments = {key: typed_value(_without_edges(value), types.get(key)) for key, value in pairs}
        return FunctionCall(name, json.dumps(arguments, ensure_ascii=False))

    return _read_blocks(text, read_block)


def _parameters(body: str) -> tuple[list[tuple[str, str]], str]:
    """Key and value of every <parameter=KEY>, as written, and the text that stands beside them.

    A value ends at its tag, the next parameter or the end.
    """
    marks = Marks(body)
    pairs: list[tuple[str, str]] = []
    other_text: list[str] = []
    position, start = 0, marks.find(_PARAMETER, 0)
    while start >= 0:
        key = start + len(_PARAMETER)
        close, line_end, opening = (marks.find(mark, key) for mark in (">", "\n", "<"))
        is_broken = 0 <= line_end < close or 0 <= opening < close
        if close <= key or is_broken or not body[key:close].strip():  # no key on one line
            start = marks.find(_PARAMETER, key)
            continue
        end, following = marks.find(_PARAMETER_END, close), marks.find(_PARAMETER, close)
        stop = min(
            (end_position for end_position in (end, following) if end_position >= 0),
            default=len(body),
        )
        other_text.append(body[position:start])
        pairs.append((body[key:close].strip(), body[close + 1 : stop]))
        position = stop + len(_PARAMETER_END) if stop == end else stop
        start = following if stop == following else marks.find(_PARAMETER, stop)
    return pairs, "".join([*other_text, body[position:]]).strip()


def _repeated_key(arguments: Sequence[tuple[str, str]]) -> str:
    """The first key that stands there twice; empty where none does."""
    keys = [key for key, _ in arguments]
    return next((key for key in keys if keys.count(key) > 1), "") if len(set(keys)) < len(keys) else ""


def read_glm(text: str, tools: ToolSchemas) -> ParsedCalls:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

    def read_block(block: str) -> FunctionCall | MalformedCall:
        name = block.partition(_KEY)[0].strip()
        if not _NAME.fullmatch(name):
            return MalformedCall(block, "A tool call must begin with the name of a tool.")
        pairs = _glm_arguments(block)
        if pairs is None:
            problem = "Each <arg_key> needs an <arg_value> after it, and nothing else may follow the name."
            return MalformedCall(block, problem, name)
        if repeated := _repeated_key(pairs):
            return MalformedCall(block, f"The argument {json.dumps(repeated)} is given twice.", name)
        types = parameter_types(tools, name)
        arguments = {key: typed_value(value, types.get(key)) for key, value in pairs}
        return FunctionCall(name, json.dumps(arguments, ensure_ascii=False))

    return _read_blocks(text, read_block)


def _glm_arguments(block: str) -> list[tuple[str, str]] | None:
    """Key and value of every argument, as written; None where a key lacks its value, or other text stands between."""
    marks = Marks(block)
    pairs: list[tuple[str, str]] = []
    start = marks.find(_KEY, 0)
    while start >= 0:
        key = start + len(_KEY)
        following, close = marks.find(_KEY, key), marks.find(_KEY_END, key)
        value = marks.skip_blanks(close + len(_KEY_END))
        while close >= 0 and not block.startswith(_VALUE, value):  # the tag is a part of the key
            close = marks.find(_KEY_END, value)
            value = marks.skip_blanks(close + len(_KEY_END))
        end = marks.find(_VALUE_END, value)
        if close < 0 or end < 0 or 0 <= following < end:
            return None
        if marks.skip_blanks(end + len(_VALUE_END)) != (following if following >= 0 else len(block)):
            return None
        pairs.append((block[key:close].strip(), block[value + len(_VALUE) : end]))
        start = following
    return pairs


def _without_edges(text: str) -> str:
    """Without the line breaks that the format puts around a value."""
    return text.removeprefix("\n").removesuffix("\n")


add_formats(
    ToolFormat(name="qwen3_coder", read=read_qwen3_coder),
    ToolFormat(
        name="glm",
        read=read_glm,
        stop_tokens=("<|observation|>", "<|user|>"),
    ),
    ToolFormat(name="hermes", read=read_hermes),
)
