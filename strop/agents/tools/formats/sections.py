"""Calls marked by control tokens: deepseek, kimi, mistral, gpt_oss.

A text in the JSON of a call may spell such a token out, which the decoded answer does not tell from the token itself:
so a mark inside of JSON that can be read ends nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

from strop.agents.tools.formats.calls import ParsedCalls, ToolSchemas, call_from_object
from strop.agents.tools.formats.parser import ToolFormat, add_formats
from strop.agents.tools.formats.scanning import Marks, without_end
from strop.agents.tools.parsed_output import FunctionCall, MalformedCall
from strop.utils.sanitize import read_json_at

_DEEPSEEK_BEGIN = "<｜tool▁calls▁begin｜>"
_DEEPSEEK = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

_KIMI_BEGIN = "<|tool_calls_section_begin|>"
_KIMI = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?")

_JSON_BEGINS = re.compile(r"\s*(?:[^\n`{]+\n```(?:json)?\n\s*)?(?=\{)")
"""Text that may stand between the mark and the object."""

_MISTRAL_BEGIN = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*(?=\{)")

_HARMONY_END = re.compile(r"<\|(?:end|call|return)\|>")
_HARMONY_TO = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_HARMONY_CHANNEL = re.compile(r"<\|channel\|>(\w+)")


def _named_call(name: str, arguments: str, identity: str | None = None) -> FunctionCall | MalformedCall:
    """A call, unless it has no name; its arguments are checked when it is executed."""
    if not name.strip():
        return MalformedCall(arguments, "A tool call must name its tool.")
    return FunctionCall(name.strip(), arguments.strip() or "{}", identity)


def _marked_calls(text: str, begin: str, middle: str, end: str) -> Iterator[tuple[str, str | None, str]]:
    """Text before and after the middle of every call, and the call as written.

    A call without an end goes to the end of the text. Behind one without a middle, nothing (None) stands after it.
    """
    marks = Marks(text)
    start = marks.find(begin, 0)
    while start >= 0:
        head = start + len(begin)
        divide, close = marks.find(middle, head), marks.find(end, head)
        if 0 <= divide < close:
            close = marks.find(end, _behind_json(text, divide + len(middle)))
        stop, after = (close, close + len(end)) if close >= 0 else (len(text), len(text))
        if 0 <= divide < stop:
            yield text[head:divide], text[divide + len(middle) : stop], text[start:after]
        else:
            yield text[head:stop], None, text[start:after]
        start = marks.find(begin, after)


def _behind_json(text: str, start: int) -> int:
    """Place behind the JSON that begins there, or in the block of it below a name; the same place where none does."""
    match = _JSON_BEGINS.match(text, start)
    with contextlib.suppress(ValueError):
        return start if match is None else read_json_at(text, match.end())[1]
    return start


def read_deepseek(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Calls with a type before and fenced JSON after the separator (V3, R1), or a name before it (V3.1)."""
    content, mark, section = text.partition(_DEEPSEEK_BEGIN)
    calls: list[FunctionCall | MalformedCall] = []
    for head_text, tail, written in _marked_calls(section, *_DEEPSEEK):
        head = head_text.strip()
        if tail is None:
            calls.append(MalformedCall(written, f"A tool call needs {_DEEPSEEK[1]} before its arguments."))
        elif head != "function":
            calls.append(_named_call(head, tail))
        elif (fenced := _split_fenced(tail)) is not None:
            calls.append(_named_call(*fenced))
        else:
            calls.append(MalformedCall(written, "A tool call needs a name and a block of JSON."))
    if mark and not calls:
        calls.append(MalformedCall(section, "Tool calls were begun, but there is none."))
    return content.strip(), calls


def _split_fenced(text: str) -> tuple[str, str] | None:
    """Name and arguments: a line, and a block of JSON under it that may lack its end."""
    name, _, block = text.lstrip().partition("\n")
    opening = next((fence for fence in ("```json\n", "```\n") if block.startswith(fence)), None)
    if not name or "`" in name or opening is None:
        return None
    return name, without_end(block.removeprefix(opening), "\n```")


def read_kimi(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Calls by id (`functions.NAME:NUMBER`), arguments as JSON."""
    content, mark, section = text.partition(_KIMI_BEGIN)
    calls: list[FunctionCall | MalformedCall] = []
    for head_text, arguments, written in _marked_calls(section, *_KIMI):
        identity = head_text.strip()
        match = _KIMI_ID.fullmatch(identity)
        if arguments is None:
            calls.append(MalformedCall(written, f"A tool call needs {_KIMI[1]} before its arguments."))
        elif match is None:
            calls.append(MalformedCall(written, "The id of a tool call must be functions.NAME:NUMBER."))
        else:
            calls.append(_named_call(match["name"], arguments, identity))
    if mark and not calls:
        calls.append(MalformedCall(section, "Tool calls were begun, but there is none."))
    return content.strip(), calls


def read_mistral(text: str, tools: ToolSchemas) -> ParsedCalls:
    """`[TOOL_CALLS]` before a JSON list of calls, or before each call as a name and `[ARGS]` with JSON."""
    content, mark, section = text.partition(_MISTRAL_BEGIN)
    calls: list[FunctionCall | MalformedCall] = []
    position = 0 if mark else len(section) + 1
    while position <= len(section):
        made, behind = _mistral_calls(section, position)
        calls += made
        position = behind + len(_MISTRAL_BEGIN)
    return content.strip(), calls


def _mistral_calls(section: str, start: int) -> tuple[list[FunctionCall | MalformedCall], int]:
    """The calls behind one mark, and the place of the next mark or the end."""

    def next_mark(place: int) -> int:
        mark = section.find(_MISTRAL_BEGIN, place)
        return mark if mark >= 0 else len(section)

    match = _MISTRAL_NAMED.match(section, start)
    if match is not None:
        behind = next_mark(_behind_json(section, match.end()))
        return [_named_call(match["name"], section[match.end() : behind], match["id"])], behind
    begin = Marks(section).skip_blanks(start)
    if section.startswith("[", begin) and not section.startswith(_MISTRAL_BEGIN, begin):
        try:
            values, end = read_json_at(section, begin)
        except ValueError as error:
            behind = next_mark(begin)
            return [MalformedCall(section[start:behind], f"Invalid JSON in tool call: {error}")], behind
        return [call_from_object(value, json.dumps(value)) for value in values], next_mark(end)
    behind = next_mark(start)
    problem = "After [TOOL_CALLS] must come a JSON list, or a name and its arguments."
    return [MalformedCall(section[start:behind], problem)], behind


def split_harmony(text: str) -> tuple[str, str]:
    """The analysis channel, and the answer without it."""
    thoughts: list[str] = []
    answer_parts: list[str] = []
    for part in text.split("<|start|>"):
        head, body = _message(part)
        channel = _HARMONY_CHANNEL.search(head) if body is not None else None
        is_thought = channel is not None and channel[1] == "analysis" and not _HARMONY_TO.search(part)
        (thoughts if is_thought else answer_parts).append(body if body is not None and is_thought else part)
    return "\n".join(thoughts), "<|start|>".join(answer_parts)


def _message(part: str) -> tuple[str, str | None]:
    """Text before <|message|>, and behind it up to its end; None where there is no such mark."""
    head, marked, rest = part.partition("<|message|>")
    if not marked:
        return head, None
    end = _HARMONY_END.search(rest)
    return head, rest[: end.start()] if end else rest


def read_harmony(text: str, tools: ToolSchemas) -> ParsedCalls:
    """Messages of the commentary channel with a recipient, `to=functions.NAME`, are calls."""
    content: list[str] = []
    calls: list[FunctionCall | MalformedCall] = []
    for part in text.split("<|start|>"):
        head, body = _message(part)
        recipient = _HARMONY_TO.search(head)
        if body is None:
            if recipient is not None:
                calls.append(MalformedCall(part, "A tool call needs <|message|> before its arguments."))
            elif part.strip() and "<|channel|>" not in part:
                content.append(part)
        elif recipient is not None:
            calls.append(_named_call(recipient[1], body))
        else:
            content.append(body)
    return "".join(content).strip(), calls


add_formats(
    ToolFormat(name="deepseek", read=read_deepseek),
    ToolFormat(name="kimi", read=read_kimi),
    ToolFormat(name="mistral", read=read_mistral),
    ToolFormat(
        name="gpt_oss",
        read=read_harmony,
        stop_tokens=("<|call|>", "<|return|>"),
        thinking=split_harmony,
    ),
)
