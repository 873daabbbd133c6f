"""Arithmetic, with a parser of its own: the expression comes from the model and is never run as a program."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from strop.agents.tools.base import BaseTool, ToolResponse
from strop.agents.tools.schemas import OpenAIFunctionToolSchema

MAX_CHARS = 500
"""Longest expression."""
MAX_BITS = 4096
"""Largest integer; a power that would be larger is refused before it is computed."""
_MAX_DEPTH = 50

_TOKEN = re.compile(
    r"\s*(?:(\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\d+(?:[eE][+-]?\d+)?)|([a-z]+)|(\*\*|//|.))"
)
_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "sqrt": math.sqrt, "abs": abs, "floor": math.floor, "ceil": math.ceil, "round": round, "exp": math.exp,
    "log": math.log, "sin": math.sin, "cos": math.cos, "tan": math.tan,
}  # fmt: skip
_CONSTANTS = {"pi": math.pi, "e": math.e}

SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example (3 + 4) * 12 / 5."}},
            "required": ["expression"],
        },
    },
}


def evaluate(expression: str) -> int | float:
    """Value of an expression of numbers, + - * / // % ** ^, parentheses, a few functions, pi and e.

    Powers bind from the right and before a sign on their left, as in Python; ^ is **.

    Raises:
        ValueError: it is no such expression, or has no finite value.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters, more than {MAX_CHARS}")
    text = expression.replace(",", "").replace("×", "*").replace("÷", "/").replace("−", "-")
    parser = _Parser([match.group(0).strip() for match in _TOKEN.finditer(text) if match.group(0).strip()])
    try:
        value = parser.all()
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the value is too large") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the value is too large")
    return value


class _Parser:
    """Recursive descent; each level of a rule binds tighter than the one before."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def all(self) -> int | float:
        value = self._sum()
        if self._at < len(self._tokens):
            raise ValueError(f"unexpected {self._tokens[self._at]!r}")
        return value

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        if not token:
            raise ValueError("the expression ends too early")
        self._at += 1
        return token

    def _sum(self) -> int | float:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("the expression is nested too deeply")
        value = self._product()
        while self._peek() in ("+", "-"):
            value = value + self._product() if self._take() == "+" else value - self._product()
        self._depth -= 1
        return value

    def _product(self) -> int | float:
        value = self._signed()
        while self._peek() in ("*", "/", "//", "%"):
            operator, other = self._take(), self._signed()
            if operator == "*":
                value = value * other
            elif operator == "/":
                value = _divided(value, other)
            else:
                value = value // other if operator == "//" else value % other
            _check_size(value)
        return value

    def _signed(self) -> int | float:
        negative = False
        while self._peek() in ("+", "-"):
            negative ^= self._take() == "-"
        value = self._power()
        return -value if negative else value

    def _power(self) -> int | float:
        base = self._atom()
        if self._peek() not in ("**", "^"):
            return base
        self._take()
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise ValueError("the expression is nested too deeply")
        exponent = self._signed()
        self._depth -= 1
        if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
            if base.bit_length() * exponent > MAX_BITS:
                raise ValueError("the value is too large")
            return int(base**exponent)
        value = float(base) ** exponent
        if isinstance(value, complex):
            raise ValueError("the value is not real")
        return float(value)

    def _atom(self) -> int | float:
        token = self._take()
        if token == "(":
            value = self._sum()
            if self._take() != ")":
                raise ValueError("a bracket is not closed")
            return value
        if token in _FUNCTIONS:
            if self._take() != "(":
                raise ValueError(f"{token} needs brackets")
            value = _FUNCTIONS[token](self._sum())
            if self._take() != ")":
                raise ValueError("a bracket is not closed")
            return value
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return int(token) if token.isdigit() else float(token)
        raise ValueError(f"unexpected {token!r}")


def _divided(value: int | float, other: int | float) -> int | float:
    """Whole numbers stay whole where they can."""
    if isinstance(value, int) and isinstance(other, int) and value % other == 0:
        return value // other
    return value / other


def _check_size(value: int | float) -> None:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("the value is too large")


def shown(value: int | float) -> str:
    """A number as people write it: at most twelve digits after rounding, no trailing zeros."""
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"


class CalculatorTool(BaseTool):
    """The calculator; an expression that cannot be computed is answered with the reason."""

    def __init__(
        self, config: Mapping[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config or {}, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """As of BaseTool."""
        expression = parameters.get("expression")
        if not isinstance(expression, str | int | float):
            return ToolResponse(text='Error: give the expression as text under "expression".'), 0.0, {}
        try:
            text = shown(evaluate(str(expression)))
        except ValueError as error:
            text = f"Error: {error}"
        return ToolResponse(text=text), 0.0, {}
