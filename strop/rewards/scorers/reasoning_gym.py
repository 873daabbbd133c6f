"""Tasks of the reasoning-gym package, scored by the task's own `score_answer`.

The answer is the content of the last `<answer>...</answer>`, or the whole stripped response when there is no
such tag. `extra_info["reasoning_gym"]` carries the entry (question, answer, metadata) as JSON text.

Some of the package's scorers hand the answer to `eval` or to sympy's parser, which evaluates Python. What a
model wrote is never evaluated here. In the modules of the first kind the name `eval` is bound to
`ast.literal_eval`; in those of the second kind an answer that is no plain arithmetic counts as no answer.
"""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from strop.rewards.scorers.budget import bounded, noted
from strop.rewards.scorers.tags import last_tagged

PREFIX = "reasoning_gym/"
KEY = "reasoning_gym"
"""Key of the entry in extra_info."""
RIGHT_FROM = 1.0
"""Score from which an answer counts as right; the package gives parts of 1 for near misses."""

LITERAL_TASKS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose scorer evaluates the answer as a Python list."""
EXPRESSION_TASKS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Tasks whose scorer evaluates the answer with sympy's parser."""

_MAX_EXPRESSION_CHARACTERS = 2000
_FUNCTIONS = frozenset({
    "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh",
    "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs",
})  # fmt: skip
_NAMES = frozenset({"pi", "E", "C"})
_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Load, ast.Constant,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub, ast.UAdd,
)  # fmt: skip


def is_expression(answer: str) -> bool:
    """Whether the text is arithmetic over numbers, one-letter variables and the usual functions."""
    if len(answer) > _MAX_EXPRESSION_CHARACTERS:
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return all(_is_harmless(node, is_called=id(node) in called) for node in ast.walk(tree))


def _is_harmless(node: ast.AST, *, is_called: bool) -> bool:
    if not isinstance(node, _NODES):
        return False
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and not node.keywords
    if isinstance(node, ast.Name):
        if is_called:
            return node.id in _FUNCTIONS
        return node.id in _NAMES or (len(node.id) == 1 and node.id.isascii() and node.id.isalpha())
    return True


def extract(solution_str: str) -> str:
    """The answer in a response: the last tagged one, or all of it."""
    tagged = last_tagged(solution_str)
    return (solution_str if tagged is None else tagged).strip()


def grade(
    solution_str: str, ground_truth: Any, *, data_source: str, extra_info: Mapping[str, Any]
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

    def compared() -> float:
        is_refused = task in EXPRESSION_TASKS and pred != entry["answer"] and not is_expression(pred)
        return float(scorer(answer=None if is_refused else pred, entry=entry))

    score, note = bounded(compared, 0.0)
    return noted({"score": score, "acc": score >= RIGHT_FROM, "pred": pred}, note)


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
    if task in LITERAL_TASKS:
        vars(sys.modules[DATASETS[task][0].__module__])["eval"] = ast.literal_eval
    scorer: Callable[..., float] = get_score_answer_fn(task)
    return scorer
