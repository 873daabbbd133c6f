"""Parameter expansions of a shell: ${NAME##*/}, ${NAME%.sh}, ${NAME/old/new}, ${NAME:2:3}, ${NAME^^}."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase

OPERATORS = r"\#\#?|%%?|//?|\^\^?|,,?|:(?![-=+?])"
"""Operators of an expression, between the name and the operand."""
_HALVES = re.compile(r"""((?:\\.|"[^"]*"|'[^']*'|[^/\\"'])*)(?:/(.*))?""", re.DOTALL)
_LITERAL = re.compile(r"""\\[*?\[\]]|"[^"]*[*?\[][^"]*"|'[^']*[*?\[][^']*'""")
"""A character of patterns that stands for itself."""


def expand_parameter(
    text: str,
    operator: str,
    operand: str,
    fill: Callable[[str], str | None],
    number: Callable[[str], int | None],
) -> str | None:
    """The text that an expression makes of a variable's; None where that is not known.

    Args:
        text: the variable's.
        operator: one of OPERATORS.
        operand: what follows it, as it is written.
        fill: gives a written word with its variables filled in, or None.
        number: gives the value of whole-number arithmetic, or None.
    """
    if operator == ":":
        return _part(text, operand, number)
    if operator.startswith(("^", ",")):
        return None if operand else _cased(text, operator)
    if operator.startswith("/"):
        return _replaced(text, operator, operand, fill)
    pattern = _pattern(operand, fill)
    if pattern is None:
        return None
    lengths = range(len(text) + 1)
    shortest = operator in ("#", "%")
    for length in lengths if shortest else reversed(lengths):
        start, end = (0, length) if operator.startswith("#") else (len(text) - length, len(text))
        if fnmatchcase(text[start:end], pattern):
            return text[end:] if operator.startswith("#") else text[:start]
    return text


def _pattern(written: str, fill: Callable[[str], str | None]) -> str | None:
    return None if _LITERAL.search(written) else fill(written)


def _cased(text: str, operator: str) -> str:
    change = str.upper if operator.startswith("^") else str.lower
    return change(text) if len(operator) > 1 else change(text[:1]) + text[1:]


def _part(text: str, operand: str, number: Callable[[str], int | None]) -> str | None:
    """`start` or `start:length`, of which negative ones count from the end."""
    first, colon, second = operand.partition(":")
    start = number(first)
    length = number(second) if colon else len(text)
    if start is None or length is None:
        return None
    start = max(0, start + len(text)) if start < 0 else start
    return text[start : start + length] if length >= 0 else text[start : len(text) + length]


def _replaced(text: str, operator: str, operand: str, fill: Callable[[str], str | None]) -> str | None:
    """`old/new`: the first place, with `//` every one; old with # or % before it at the beginning or end alone."""
    halves = _HALVES.fullmatch(operand)
    if halves is None:
        return None
    written, anchor = halves[1], ""
    if operator == "/" and written[:1] in ("#", "%"):
        written, anchor = written[1:], written[0]
    pattern, new = _pattern(written, fill), fill(halves[2] or "")
    if pattern is None or new is None:
        return None
    if not pattern:
        return text if not anchor else new + text if anchor == "#" else text + new
    result, at = "", 0
    while at < len(text):
        end = _longest(text, at, pattern, anchor)
        if end is None:
            if anchor == "#":
                break
            result += text[at]
            at += 1
            continue
        result += new
        at = max(end, at + 1)
        if operator == "/":
            break
    return result + text[at:]


def _longest(text: str, start: int, pattern: str, anchor: str) -> int | None:
    """End of the longest match that begins here; with anchor %, of one that ends with the text."""
    ends = [len(text)] if anchor == "%" else range(len(text), start, -1)
    return next((end for end in ends if fnmatchcase(text[start:end], pattern)), None)
