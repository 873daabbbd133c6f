"""Arithmetic: the expression comes from the model, is parsed by `ast`, and is never run as a program."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from strop.agents.tools.base import BaseTool, ToolResponse
from strop.agents.tools.schemas import OpenAIFunctionToolSchema

MAX_CHARS = 500
"""Longest expression."""
MAX_BITS = 4096
"""Largest integer; a power that would be larger is refused before it is computed."""
_MAX_DEPTH = 50
"""Brackets inside each other."""

_LEADING_ZEROS = re.compile(r"(?<![\w.])0+(?=\d)")
"""Leading zeros as in 007, which Python's grammar does not take."""
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
    text = (
        expression.replace(",", "").replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**")
    )
    text = _LEADING_ZEROS.sub("", " ".join(text.split()))
    try:
        value = _value(_parse(text), text)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the value is too large") from None
    except (RecursionError, MemoryError):
        raise ValueError("the expression is nested too deeply") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("the value is too large")
    return value


def _parse(text: str) -> ast.expr:
    levels = accumulate((char == "(") - (char == ")") for char in text)
    if max(levels, default=0) > _MAX_DEPTH:
        raise ValueError("the expression is nested too deeply")
    if "#" in text:  # a comment to Python's grammar, which would drop what follows
        raise ValueError("unexpected '#'")
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        start = (error.offset or len(text) + 1) - 1  # 0: at the end
        if start >= len(text) or error.msg.endswith("was never closed"):
            raise ValueError("the expression ends too early") from None
        end = (error.end_offset or 0) - 1
        raise ValueError(f"unexpected {text[start : max(end, start + 1)]!r}") from None


def _value(node: ast.expr, text: str) -> int | float:
    """Value of a node; of the kinds that are not listed here, nothing is computed."""
    value: int | float
    match node:
        case ast.Constant(value=bool()):
            raise ValueError(f"unexpected {ast.get_source_segment(text, node)!r}")
        case ast.Constant(value=int() | float() as number):
            value = number
        case ast.Name(id=name) if name in _CONSTANTS:
            value = _CONSTANTS[name]
        case ast.Name(id=name) if name in _FUNCTIONS:
            raise ValueError(f"{name} needs brackets")
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            value = _FUNCTIONS[name](_value(argument, text))
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            value = _value(operand, text)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -_value(operand, text)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            value = _OPERATIONS[type(operation)](_value(left, text), _value(right, text))
        case _:
            raise ValueError(f"unexpected {ast.get_source_segment(text, node)!r}")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("the value is too large")
    return value


def _power(base: int | float, exponent: int | float) -> int | float:
    """Whole where both are; refused before it is computed where it would be too large."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        if base.bit_length() * exponent > MAX_BITS:
            raise ValueError("the value is too large")
        return int(base**exponent)
    value = float(base) ** exponent
    if isinstance(value, complex):
        raise ValueError("the value is not real")
    return float(value)


def _divide(value: int | float, divisor: int | float) -> int | float:
    """Whole numbers stay whole where they can."""
    if isinstance(value, int) and isinstance(divisor, int) and value % divisor == 0:
        return value // divisor
    return value / divisor


_OPERATIONS: dict[type[ast.operator], Callable[[int | float, int | float], int | float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _divide,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power,
}  # fmt: skip


def format_number(value: int | float) -> str:
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
            text = format_number(evaluate(str(expression)))
        except ValueError as error:
            text = f"Error: {error}"
        return ToolResponse(text=text), 0.0, {}
