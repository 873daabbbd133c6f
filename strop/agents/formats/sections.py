"""Calls marked by control tokens: deepseek, kimi, mistral, gpt_oss."""

from __future__ import annotations

import json
import re

from strop.agents.formats.calls import (
    FunctionCall,
    MalformedCall,
    Read,
    ToolSchemas,
    call_from_object,
)
from strop.agents.formats.parser import ToolFormat, formats

_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(?P<head>.*?)<｜tool▁sep｜>(?P<tail>.*?)(?P<end><｜tool▁call▁end｜>|\Z)", re.DOTALL
)
_DEEPSEEK_BEGIN = "<｜tool▁calls▁begin｜>"
_FENCED = re.compile(r"\s*(?P<name>[^\n`]+)\n```(?:json)?\n(?P<arguments>.*?)(?:\n```\s*|\Z)", re.DOTALL)

_KIMI = re.compile(
    r"<\|tool_call_begin\|>(?P<id>.*?)<\|tool_call_argument_begin\|>(?P<arguments>.*?)(?P<end><\|tool_call_end\|>|\Z)",
    re.DOTALL,
)
_KIMI_BEGIN = "<|tool_calls_section_begin|>"
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?")

_MISTRAL_BEGIN = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*(?=\{)")

_HARMONY = re.compile(
    r"(?P<head>.*?)<\|message\|>(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)", re.DOTALL
)
_HARMONY_TO = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_HARMONY_CHANNEL = re.compile(r"<\|channel\|>(\w+)")


def _checked(name: str, arguments: str, identity: str | None = None) -> FunctionCall | MalformedCall:
    """A call, unless it has no name; what is wrong with its arguments is told when it is carried out."""
    if not name.strip():
        return MalformedCall(arguments, "A tool call must name its tool.")
    return FunctionCall(name.strip(), arguments.strip() or "{}", identity)


def read_deepseek(text: str, tools: ToolSchemas) -> Read:
    """Calls with a type before and fenced JSON after the separator (V3, R1), or a name before it (V3.1)."""
    content, begun, section = text.partition(_DEEPSEEK_BEGIN)
    calls: list[FunctionCall | MalformedCall] = []
    for match in _DEEPSEEK.finditer(section):
        head, tail = match["head"].strip(), match["tail"]
        fenced = _FENCED.fullmatch(tail)
        if head == "function" and fenced is not None:
            calls.append(_checked(fenced["name"], fenced["arguments"]))
        elif head == "function":
            calls.append(MalformedCall(match[0], "A tool call needs a name and a block of JSON."))
        else:
            calls.append(_checked(head, tail))
    if begun and not calls:
        calls.append(MalformedCall(section, "Tool calls were begun, but there is none."))
    return content.strip(), calls


def read_kimi(text: str, tools: ToolSchemas) -> Read:
    """Calls by id (`functions.NAME:NUMBER`), arguments as JSON."""
    content, begun, section = text.partition(_KIMI_BEGIN)
    calls: list[FunctionCall | MalformedCall] = []
    for match in _KIMI.finditer(section):
        identity = match["id"].strip()
        named = _KIMI_ID.fullmatch(identity)
        if named is None:
            calls.append(MalformedCall(match[0], "The id of a tool call must be functions.NAME:NUMBER."))
        else:
            calls.append(_checked(named["name"], match["arguments"], identity))
    if begun and not calls:
        calls.append(MalformedCall(section, "Tool calls were begun, but there is none."))
    return content.strip(), calls


def read_mistral(text: str, tools: ToolSchemas) -> Read:
    """`[TOOL_CALLS]` before a JSON list of calls, or before each call as a name and `[ARGS]` with JSON."""
    content, begun, section = text.partition(_MISTRAL_BEGIN)
    calls: list[FunctionCall | MalformedCall] = []
    for part in section.split(_MISTRAL_BEGIN) if begun else ():
        calls += _mistral_calls(part)
    return content.strip(), calls


def _mistral_calls(part: str) -> list[FunctionCall | MalformedCall]:
    if part.lstrip().startswith("["):
        try:
            values, _ = json.JSONDecoder().raw_decode(part.lstrip())
        except json.JSONDecodeError as error:
            return [MalformedCall(part, f"Invalid JSON in tool call: {error}")]
        return [call_from_object(value, json.dumps(value), arguments_key="arguments") for value in values]
    named = _MISTRAL_NAMED.match(part)
    if named is None:
        return [MalformedCall(part, "After [TOOL_CALLS] must come a JSON list, or a name and its arguments.")]
    return [_checked(named["name"], part[named.end() :], named["id"])]


def split_harmony(text: str) -> tuple[str, str]:
    """The analysis channel, and the answer without it."""
    thoughts: list[str] = []
    kept: list[str] = []
    for part in text.split("<|start|>"):
        match = _HARMONY.match(part)
        channel = _HARMONY_CHANNEL.search(match["head"]) if match else None
        is_thought = channel is not None and channel[1] == "analysis" and not _HARMONY_TO.search(part)
        (thoughts if is_thought else kept).append(match["body"] if match and is_thought else part)
    return "\n".join(thoughts), "<|start|>".join(kept)


def read_harmony(text: str, tools: ToolSchemas) -> Read:
    """Messages of the commentary channel with a recipient, `to=functions.NAME`, are calls."""
    content: list[str] = []
    calls: list[FunctionCall | MalformedCall] = []
    for part in text.split("<|start|>"):
        match = _HARMONY.match(part)
        if match is None:
            if _HARMONY_TO.search(part):
                calls.append(MalformedCall(part, "A tool call needs <|message|> before its arguments."))
            elif part.strip() and "<|channel|>" not in part:
                content.append(part)
            continue
        recipient = _HARMONY_TO.search(match["head"])
        if recipient is not None:
            calls.append(_checked(recipient[1], match["body"]))
        else:
            content.append(match["body"])
    return "".join(content).strip(), calls


formats.add(
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
