"""Countdown: expressions are read, never evaluated, and must use the numbers they are given."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data.prepare import prepare_rows
from strop.rewards.scorers import default_compute_score
from strop.rewards.scorers.countdown import grade, parse

TASK = {"target": 10, "numbers": [2, 3, 4]}


def score(answer: str, **kwargs: Any) -> float:
    return float(
        grade(f"I think <answer>1</answer>, no: <answer> {answer} </answer>", TASK, **kwargs)["score"]
    )


@pytest.mark.parametrize("answer", ["2 * 3 + 4", "4+(3*2)", "((4)) + 2*3", "4--(2*3)", "4 - -2 * 3"])
def test_right_expressions(answer: str) -> None:
    assert score(answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "10", "4 + 3 + 3", "2*3 + 4 + 0", "2 * 3 - 4", "4 + 6", "2*4 + 2", "2 * 3 + 4 = 10", "", "(2*3 + 4", "2*3) + 4",
        "2 3 4", "2 ** 3 + 4", "2*3+4.0", "2*3+4+x", "__import__('os').system('true')", "2/(3-3)+4",
        "+2*3+4", "2*3+4 #",
        "٢*3+4", "9" * 600, "(" * 200 + "2*3+4" + ")" * 200, "9" * 30 + "*2*3*4",
    ],
)  # fmt: skip
def test_wrong_expressions(answer: str) -> None:
    assert score(answer) == 0.0


def test_options_of_the_rule() -> None:
    assert score("2 * 4 + 2", each_once=False) == 0.0, "2 is given once"
    more = {"target": 12, "numbers": [2, 3, 4]}
    assert grade("<answer>3*4</answer>", more)["score"] == 0.0, "2 is left over"
    assert grade("<answer>3*4</answer>", more, each_once=False)["acc"] is True
    assert score("2 + 3 + 4", format_score=0.1) == 0.1
    assert score("2 +", format_score=0.1) == 0.0
    assert grade("no tag: 2*3+4", TASK) == {"score": 0.0, "acc": False, "pred": ""}


def test_fractions_are_exact() -> None:
    # 8 / (3 - 8/3) = 8 / (1/3) = 24, which floats miss
    task = {"target": 24, "numbers": [3, 3, 8, 8]}
    assert grade("<answer>8/(3-8/3)</answer>", task)["acc"] is True
    assert parse("1/0 + 2")[0] is None


@st.composite
def expressions(draw: st.DrawFn, depth: int = 0) -> str:
    if depth > 3 or draw(st.booleans()):
        return str(draw(st.integers(0, 20)))
    left, right = draw(expressions(depth=depth + 1)), draw(expressions(depth=depth + 1))
    text = f"{left} {draw(st.sampled_from('+-*/'))}{right}"
    return draw(st.sampled_from([text, f"({text})", f"-({text})"]))


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value(node: ast.expr) -> Fraction:
    """The value by Python's own grammar."""
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value(node.left), value(node.right))  # type: ignore[index,no-any-return]
    if isinstance(node, ast.UnaryOp):
        return -value(node.operand)
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int)
    return Fraction(node.value)


@settings(max_examples=150, deadline=None)
@given(expressions())
def test_values_are_those_of_pythons_grammar(text: str) -> None:
    tree = ast.parse(text, mode="eval")
    found, used = parse(text)
    try:
        assert found == value(tree.body)
    except ZeroDivisionError:
        assert found is None
        return
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert used == Counter(constants)


def test_prepared_rows_are_scored_by_their_data_source() -> None:
    (row,) = prepare_rows("countdown", [{"nums": [2, 3, 4], "target": 10}], split="train").rows
    truth = row["reward_model"]["ground_truth"]
    assert default_compute_score(row["data_source"], "<answer>2*3+4</answer>", truth)["score"] == 1.0
    with pytest.raises(ValueError, match="the ground truth of countdown is '10', but it must be"):
        default_compute_score("countdown", "<answer>10</answer>", "10")
