"""Tool calls found with one expression per format: short and plain, and slow where a text is hostile.

Calls are (name, arguments) with arguments as written, a dictionary of texts, or None where the call is malformed.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

Found = list[tuple[str, Any]]

_CODER_LAST, _CODER_NEXT = r"</parameter>\s*</function>\s*</tool_call>", r"<tool_call>\s*<function="
_GLM_LAST, _GLM_NEXT = r"</arg_value>\s*</tool_call>", r"<tool_call>\s*[\w.:-]+\s*<arg_key>"
_FUNCTION = re.compile(r"\s*<function=[^\S\n]*([^\s<>]+)[^\S\n]*>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
_OPENING = r"<parameter=(?=[^<>\n]*[^\s<>])[^<>\n]+>"
_PARAMETER = re.compile(
    rf"(?={_OPENING})<parameter=([^>]+)>(.*?)(?:(</parameter>)(?=\s*(?:<parameter=|\Z))|(?={_OPENING})|\Z)",
    re.DOTALL,
)
_GLM_ARGUMENT = re.compile(
    r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
)
_GLM_BROKEN = re.compile(r"</arg_(?:key|value)>\s*<arg_value>")
_DEEPSEEK = re.compile(
    r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁sep｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)|<｜tool▁call▁end｜>|\Z)",
    re.DOTALL,
)
_FENCED = re.compile(r"\s*([^\n`]+)\n```(?:json)?\n(.*?)(?:\n```\s*|\Z)", re.DOTALL)
_KIMI = re.compile(
    r"<\|tool_call_begin\|>(.*?)"
    r"(?:<\|tool_call_argument_begin\|>(.*?)(?:<\|tool_call_end\|>|\Z)|<\|tool_call_end\|>|\Z)",
    re.DOTALL,
)
_HARMONY = re.compile(r"(.*?)<\|message\|>(.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)", re.DOTALL)


def blocks(text: str, first: str, last: str, following: str) -> list[str]:
    """The texts between tags: to the first closing tag, or to one behind the last value where that comes before another
    call begins."""
    found: list[str] = []
    while "<tool_call>" in text and "</tool_call>" in (rest := text.partition("<tool_call>")[2]):
        block, _, behind = rest.partition("</tool_call>")
        end = re.search(last, rest)
        if first in block and end and not re.search(following, rest[len(block) : end.start()] + " "):
            block, behind = rest[: end.end() - len("</tool_call>")], rest[end.end() :]
        found.append(block)
        text = behind
    return found


def qwen3_coder(text: str) -> Found:
    found: Found = []
    for block in blocks(text, "<parameter=", _CODER_LAST, _CODER_NEXT):
        match = _FUNCTION.fullmatch(block)
        if match is None:
            found.append(("", None))
        else:
            arguments = _PARAMETER.findall(match[2])
            values = {key.strip(): value.removeprefix("\n").removesuffix("\n") for key, value, _ in arguments}
            is_whole = not _PARAMETER.sub("", match[2]).strip() and len(values) == len(arguments)
            is_whole = is_whole and all(
                closed or "</parameter>" not in value for _, value, closed in arguments
            )
            found.append((match[1].strip(), values if is_whole else None))
    return found


def glm(text: str) -> Found:
    found: Found = []
    for block in blocks(text, "<arg_key>", _GLM_LAST, _GLM_NEXT):
        name = block.partition("<arg_key>")[0].strip()
        arguments = _GLM_ARGUMENT.findall(block)
        is_named = re.fullmatch(r"[\w.:-]+", name) is not None
        values = {key.strip(): value for key, value in arguments}
        beside = _GLM_ARGUMENT.sub("", block).strip()
        is_broken = any("<arg_key>" in key or _GLM_BROKEN.search(value) for key, value in arguments)
        is_whole = is_named and len(values) == len(arguments) and beside == name and not is_broken
        found.append((name if is_named else "", values if is_whole else None))
    return found


def deepseek(text: str) -> Found:
    found: Found = []
    for match in _DEEPSEEK.finditer(text.partition("<｜tool▁calls▁begin｜>")[2]):
        head, tail = match.groups()
        if tail is None:
            found.append(("", None))
            continue
        fenced = _FENCED.fullmatch(tail)
        name, arguments = (fenced[1], fenced[2]) if head.strip() == "function" and fenced else (head, tail)
        is_whole = bool(name.strip()) and (head.strip() != "function" or fenced is not None)
        found.append((name.strip(), arguments.strip() or "{}") if is_whole else ("", None))
    return found


def kimi(text: str) -> Found:
    found: Found = []
    for match in _KIMI.finditer(text.partition("<|tool_calls_section_begin|>")[2]):
        identity, arguments = match.groups()
        named = re.fullmatch(r"(?:functions\.)?([\w.-]+?)(?::\d+)?", identity.strip())
        is_whole = named is not None and arguments is not None
        found.append((named[1], arguments.strip() or "{}") if is_whole else ("", None))
    return found


def gpt_oss(text: str) -> Found:
    found: Found = []
    for part in text.split("<|start|>"):
        match = _HARMONY.match(part)
        recipient = re.search(r"\bto=(?:functions\.)?([\w.-]+)", match[1] if match else part)
        if recipient is not None:
            found.append((recipient[1], match[2].strip() or "{}") if match else ("", None))
    return found


def pythonic(text: str) -> Found | None:
    """Calls whose arguments are plain values; None where Python reads something else."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        assert isinstance(tree, ast.List)
        found: Found = []
        for node in tree.elts:
            assert isinstance(node, ast.Call)
            assert not node.args
            assert all(one.arg for one in node.keywords)
            values = {one.arg: ast.literal_eval(one.value) for one in node.keywords}
            found.append((ast.unparse(node.func), json.loads(json.dumps(values))))
        return found
    except (AssertionError, SyntaxError, TypeError, ValueError):
        return None
