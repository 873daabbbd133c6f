"""Tasks of the reasoning-gym package, scored by the task's own `score_answer`.

The answer is the content of the last `<answer>...</answer>`, or the whole stripped response when there is no
such tag. `extra_info["reasoning_gym"]` carries the entry (question, answer, metadata) as JSON text.

Some of the package's scorers hand the answer, or texts of the row, to `eval` or to sympy's parser, which evaluates
Python. Neither what a model wrote nor what a row holds is evaluated here: in the modules of the tasks both names are
bound to functions that take literals and plain arithmetic alone.
"""

from __future__ import annotations

import ast
import functools
import json
import operator
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from strop.rewards.scorers.budget import bounded, with_note
from strop.rewards.scorers.tags import last_tagged
from strop.utils.sanitize import usable

PREFIX = "reasoning_gym/"
KEY = "reasoning_gym"
"""Key of the entry in extra_info."""
RIGHT_FROM = 1.0
"""Score from which an answer counts as right; the package gives parts of 1 for near misses."""

EXPRESSION_TASKS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Tasks whose scorer hands the answer to sympy's parser."""

_MAX_EXPRESSION_CHARACTERS = 2000
_FUNCTIONS = frozenset({
    "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh",
    "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs",
})  # fmt: skip
_UNSOLVED = "Integral"
"""A function that the package's own answers may hold; in a model's, the question would answer itself."""
_A_WORD = re.compile(r"[a-df-hk-z]", re.IGNORECASE)
"""Letters that no complex number has; the package takes nan for any of them."""
_NAMES = frozenset({"pi", "E", "C"})
_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Load, ast.Constant,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub, ast.UAdd,
)  # fmt: skip
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip


def is_expression(answer: str, *, functions: frozenset[str] = _FUNCTIONS) -> bool:
    """True if the text is arithmetic over numbers, one-letter variables and these functions."""
    if len(answer) > _MAX_EXPRESSION_CHARACTERS:
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return all(_is_harmless(node, functions if id(node) in called else None) for node in ast.walk(tree))


def _is_harmless(node: ast.AST, called: frozenset[str] | None) -> bool:
    """Args:
    node: of a parsed text.
    called: the functions it may name; None where it is not called.
    """
    if not isinstance(node, _NODES):
        return False
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and not node.keywords
    if isinstance(node, ast.Name):
        if called is not None:
            return node.id in called
        return node.id in _NAMES or (len(node.id) == 1 and node.id.isascii() and node.id.isalpha())
    return True


def extract(solution_str: str) -> str:
    """The answer in a response: the last tagged one, or all of it."""
    tagged = last_tagged(solution_str)
    return (solution_str if tagged is None else tagged).strip()


def grade(
    solution_str: str, ground_truth: object, *, data_source: str, extra_info: Mapping[str, Any]
) -> dict[str, Any]:
    """The task's own score of the answer, from 0 to 1; `acc` is True for a full score.

    Raises:
        ValueError: the row carries no entry, or the package has no such task.
    """
    task = data_source.removeprefix(PREFIX)
    if KEY not in extra_info:
        raise ValueError(
            f"a row of {data_source!r} has no extra_info.{KEY}: it holds the entry as JSON text, as "
            f"examples/reasoning_gym/prepare.py writes it"
        )
    stored = extra_info[KEY]
    entry = json.loads(stored) if isinstance(stored, str) else stored
    pred = extract(solution_str)
    scorer = _score_answer(task)

    def score_answer() -> float:
        if task == "game_of_life_halting":  # the package takes every text for the word True
            return float(pred.casefold() == str(entry["answer"]).casefold())
        is_refused = task in EXPRESSION_TASKS and pred != entry["answer"] and not is_expression(pred)
        is_refused |= task == "complex_arithmetic" and _A_WORD.search(pred) is not None
        try:
            return usable(scorer(answer=None if is_refused else pred, entry=entry)) or 0.0
        except Exception:  # noqa: BLE001 (whatever an answer makes the package raise)
            scorer(answer=entry["answer"], entry=entry)  # raises where it is the row's doing
            return 0.0

    score, note = bounded(score_answer, 0.0)
    return with_note({"score": score, "acc": score >= RIGHT_FROM, "pred": pred}, note)


@functools.cache  # a task reads its whole data set when it is made: up to 0.2 s
def _score_answer(task: str) -> Callable[..., float]:
    """The task's own scorer, made harmless."""
    try:
        from reasoning_gym.factory import DATASETS, get_score_answer_fn  # loads a hundred task modules
    except ModuleNotFoundError as error:
        raise ValueError(
            f"data_source {PREFIX}{task} needs the reasoning-gym package: pip install 'strop[reasoning-gym]'"
        ) from error

    if task not in DATASETS:
        raise ValueError(
            f"the reasoning-gym package has no task {task!r}; known: {', '.join(sorted(DATASETS))}"
        )
    _disarm(sys.modules[DATASETS[task][0].__module__])
    scorer: Callable[..., float] = get_score_answer_fn(task)
    return scorer


def _disarm(module: ModuleType) -> None:
    """Replace functions that evaluate Python in a task's module by harmless ones."""
    names = vars(module)
    names["eval"] = _evaluate
    for name, value in list(names.items()):
        if isinstance(value, ModuleType) and value.__name__ == "sympy":
            harmless = ModuleType("sympy")
            vars(harmless).update(vars(value), parse_expr=_parse, sympify=_parse)
            names[name] = harmless
        elif name == "parse_expr" and str(value.__module__).startswith("sympy."):
            names[name] = _parse


def _evaluate(text: str) -> Any:
    """The value of a literal, or of arithmetic over integers.

    Raises:
        ValueError: the text is neither.
    """
    try:
        return ast.literal_eval(text)
    except ValueError:
        return _integer(ast.parse(text.strip(), mode="eval").body)


def _integer(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_integer(node.left), _integer(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_integer(node.operand)
    raise ValueError(f"no arithmetic over integers: {type(node).__name__}")


def _parse(text: object, *args: Any, **kwargs: Any) -> Any:
    """sympy's parser for expressions; it makes Python of them and evaluates that.

    Raises:
        ValueError: the text is no expression.
    """
    if not isinstance(text, str) or not is_expression(text, functions=_FUNCTIONS | {_UNSOLVED}):
        raise ValueError("not a plain expression")
    from sympy.parsing.sympy_parser import parse_expr  # type: ignore[import-untyped]

    return parse_expr(text, *args, **kwargs)
