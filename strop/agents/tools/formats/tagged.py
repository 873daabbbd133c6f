"""Calls between tags: hermes (Qwen2.5, Qwen3), qwen3_coder, glm.

Nothing is escaped in the values of qwen3_coder and glm, and a value may spell a tag of its format out. So a tag closes
only where the next one, or the end, stands behind it: </parameter> before <parameter= or the end of the function,
</tool_call> behind </parameter></function>. Where no tag stands so, the first one closes, as in the parsers of vLLM and
SGLang.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Sequence

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
_PARAMETER = "<parameter="
_KEY = "<arg_key>"
_CODER_LAST = re.compile(r"</parameter>\s*</function>\s*</tool_call>")
_CODER_NEXT = re.compile(r"<tool_call>\s*<function=")
_CODER_TAG = re.compile(r"</parameter>|<parameter=([^<>\n]+)>")
_GLM_LAST = re.compile(r"</arg_value>\s*</tool_call>")
_GLM_NEXT = re.compile(r"<tool_call>\s*[\w.:-]+\s*<arg_key>")
_GLM_DIVIDE = re.compile(r"</arg_key>\s*<arg_value>")
_GLM_STOP = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|\Z))")
_GLM_BROKEN = re.compile(r"</arg_(?:key|value)>\s*<arg_value>")
_NAME = re.compile(r"[\w.:-]+")
_TAG_NAME = re.compile(r"[^\s<>]+")


def _read_blocks(
    text: str,
    read_block: Callable[[str], FunctionCall | MalformedCall],
    find_end: Callable[[Marks, int], int],
) -> ParsedCalls:
    """Every block between the tags; the text outside of them is the content.

    Args:
        text: of an answer.
        read_block: reads the text between two tags.
        find_end: place of the closing tag of the block that begins there; -1 where none does.
    """
    content: list[str] = []
    calls: list[FunctionCall | MalformedCall] = []
    marks = Marks(text)
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        content.append(text[position:start])
        end = find_end(marks, start + len(OPEN))
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


def _end_of_json(marks: Marks, start: int) -> int:
    """Place of the next tag, behind the JSON value that begins there, whose texts may spell the tag out."""
    with contextlib.suppress(ValueError):
        _, start = read_json_at(marks.text, marks.skip_blanks(start))
    return marks.text.find(CLOSE, start)


def _end_of_values(
    first: str, last: re.Pattern[str], next_call: re.Pattern[str]
) -> Callable[[Marks, int], int]:
    """Finds the closing tag of a block with values that may spell it out.

    Args:
        first: tag with which values begin.
        last: closing tags of the last value and of the block.
        next_call: beginning of another block, which is no part of a value.
    """

    def find(marks: Marks, start: int) -> int:
        close = marks.text.find(CLOSE, start)
        if close < 0 or marks.text.find(first, start, close) < 0:
            return close
        end, following = marks.search(last, start), marks.search(next_call, close)
        if end is None or (following is not None and following.start() < end.start()):
            return close
        return end.end() - len(CLOSE)

    return find


def read_qwen3_coder(text: str, tools: ToolSchemas) -> ParsedCalls:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

    def read_block(block: str) -> FunctionCall | MalformedCall:
        written, closed, body = block.lstrip().removeprefix(_FUNCTION).partition(">")
        name = written.strip()
        is_tag = block.lstrip().startswith(_FUNCTION) and closed and "\n" not in written
        if not (is_tag and _TAG_NAME.fullmatch(name)):
            return MalformedCall(block, "A tool call must be <function=NAME> ... </function>.")
        types = parameter_types(tools, name)
        pairs, other_text = _parameters(without_end(body, _FUNCTION_END), types)
        if other_text:
            problem = "Each argument of a tool call must be <parameter=KEY>VALUE</parameter>."
            return MalformedCall(block, problem, name)
        if repeated := _repeated_key(pairs):
            return MalformedCall(block, f"The argument {json.dumps(repeated)} is given twice.", name)
        arguments = {key: typed_value(_without_edges(value), types.get(key)) for key, value in pairs}
        return FunctionCall(name, json.dumps(arguments, ensure_ascii=False))

    return _read_blocks(text, read_block, _end_of_values(_PARAMETER, _CODER_LAST, _CODER_NEXT))


def _parameters(body: str, known: Collection[str]) -> tuple[list[tuple[str, str]], str]:
    """Key and value of every <parameter=KEY>, as written, and the text that stands beside them.

    A value without a tag behind it ends at the next parameter, which has a known key where the tool is known.
    """
    marks = Marks(body)
    pairs: list[tuple[str, str]] = []
    other_text: list[str] = []
    key, position, close = "", 0, None
    for tag in _CODER_TAG.finditer(body):
        if tag[1] is None:
            behind = marks.skip_blanks(tag.end())
            if key and (behind == len(body) or body.startswith(_PARAMETER, behind)):
                pairs.append((key, body[position : tag.start()]))
                key, position, close = "", tag.end(), None
            elif key:
                close = close or tag
            continue
        new_key = tag[1].strip()
        if not new_key or (key and known and new_key not in known):
            continue
        if key:
            pairs.append((key, body[position : tag.start()]))
            position = close.end() if close else tag.start()
        other_text.append(body[position : tag.start()])
        key, position, close = new_key, tag.end(), None
    if key:
        pairs.append((key, body[position:]))
        position = close.end() if close else len(body)
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

    return _read_blocks(text, read_block, _end_of_values(_KEY, _GLM_LAST, _GLM_NEXT))


def _glm_arguments(block: str) -> list[tuple[str, str]] | None:
    """Key and value of every argument, as written; None where a key lacks its value, or other text stands between."""
    marks = Marks(block)
    pairs: list[tuple[str, str]] = []
    start = block.find(_KEY)
    while 0 <= start < len(block):
        divide = _GLM_DIVIDE.search(block, start)
        stop = _GLM_STOP.search(block, divide.end()) if divide else None
        if divide is None or stop is None:
            return None
        key, value = block[start + len(_KEY) : divide.start()], block[divide.end() : stop.start()]
        if _KEY in key or _GLM_BROKEN.search(value):
            return None
        pairs.append((key.strip(), value))
        start = marks.skip_blanks(stop.end())
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
