"""Countdown: reach a target from given numbers with + - * / and brackets, each number used exactly once.

The expression is the content of the last `<answer>...</answer>`. It is read by a small parser into exact fractions and
never evaluated as code:

    sum      product (('+' | '-') product)*
    product  factor (('*' | '/') factor)*
    factor   '-' factor | '(' sum ')' | digits
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from strop.rewards.scorers.tags import last_tagged

_TOKEN = re.compile(r"\s*(?:(?P<number>\d+)|(?P<sign>[-+*/()]))", re.ASCII)
_MAX_CHARACTERS = 500
_MAX_DIGITS = 20
_MAX_DEPTH = 50
"""Brackets within each other; far above any answer, far below the interpreter's limit."""


class _Malformed(ValueError):
    """The text is no expression."""


def grade(
    solution_str: str, ground_truth: object, *, each_once: bool = True, format_score: float = 0.0
) -> dict[str, Any]:
    """1 when the expression has the target as its value and uses the numbers as it should, else 0.

    Args:
        solution_str: the response.
        ground_truth: {"target": int, "numbers": [int, ...]}.
        each_once: every number must be used; False: each at most as often as it is given.
        format_score: score of an answer that is an expression, but not a right one.

    Raises:
        ValueError: ground_truth has another form.
    """
    target, numbers = _task(ground_truth)
    pred = (last_tagged(solution_str) or "").strip()
    try:
        value, used = parse(pred)
    except _Malformed:
        return {"score": 0.0, "acc": False, "pred": pred}
    available = Counter(numbers)
    is_allowed = used == available if each_once else used <= available
    is_right = is_allowed and value == target
    return {"score": 1.0 if is_right else format_score, "acc": is_right, "pred": pred}


def parse(text: str) -> tuple[Fraction | None, Counter[int]]:
    """Value of an arithmetic expression over whole numbers, and the numbers in it; None for a division by zero.

    Raises:
        ValueError: the text is no such expression, or too long.
    """
    if len(text) > _MAX_CHARACTERS:
        raise _Malformed(f"the expression has {len(text)} characters; at most {_MAX_CHARACTERS} are read")
    parser = _Parser(_tokens(text.strip()))
    try:
        value: Fraction | None = parser.sum(0)
    except ZeroDivisionError:
        return None, parser.used
    if parser.peek():
        raise _Malformed(f"{parser.peek()!r} stands where the expression should end")
    return value, parser.used


@dataclass
class _Parser:
    tokens: list[str]
    at: int = 0
    used: Counter[int] = field(default_factory=Counter)

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.peek() in ("+", "-"):
            if self.take() == "+":
                value += self.product(depth)
            else:
                value -= self.product(depth)
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while self.peek() in ("*", "/"):
            if self.take() == "*":
                value *= self.factor(depth)
            else:
                value /= self.factor(depth)
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > _MAX_DEPTH:
            raise _Malformed(f"more than {_MAX_DEPTH} brackets or signs within each other")
        token = self.take()
        if token == "-":
            return -self.factor(depth + 1)
        if token == "(":
            value = self.sum(depth + 1)
            if self.take() != ")":
                raise _Malformed("a bracket is not closed")
            return value
        if not token.isdigit():
            raise _Malformed(f"{token!r} stands where a number should")
        self.used[int(token)] += 1
        return Fraction(int(token))


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or len(match["number"] or "") > _MAX_DIGITS:
            raise _Malformed(f"{text[at : at + 20]!r} is no number, sign or bracket")
        tokens.append(match["number"] or match["sign"])
        at = match.end()
    return tokens


def _task(ground_truth: object) -> tuple[int, list[int]]:
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else None
    numbers = ground_truth.get("numbers") if isinstance(ground_truth, Mapping) else None
    if target is None or numbers is None:
        raise ValueError(
            f"the ground truth of countdown is {ground_truth!r}, but it must be {{'target': 24, 'numbers': [2, 3, 4]}}"
        )
    return int(target), [int(number) for number in numbers]
