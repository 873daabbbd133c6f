from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from strop.rewards import default_compute_score, known_data_sources
from strop.rewards.scorers import gsm8k, math_boxed, math_dapo, reasoning_gym


@pytest.mark.parametrize(
    ("solution", "expected"),
    [
        ("so 70 + 2 = 72\n#### 72", 1.0),
        ("#### 72.", 1.0),
        ("#### $72", 1.0),
        ("#### 72.0", 1.0),
        ("#### 7 or rather\n#### 72", 1.0),
        ("#### 72\n#### 7", 0.0),
        ("#### -72", 0.0),
        ("72", 0.0),
        ("#### seventy-two", 0.0),
        ("#### 72" + " " * 300, 0.0),
        ("#### 7.2.1", 0.0),
        ("#### ,", 0.0),
    ],
)
def test_gsm8k_strict(solution: str, expected: float) -> None:
    assert gsm8k.compute_score(solution, "72") == expected


def test_gsm8k_reads_signs_and_thousands() -> None:
    assert gsm8k.compute_score("#### 1,234,500", "1234500") == 1.0
    assert gsm8k.compute_score("#### -$1,200.50", "-1200.50") == 1.0
    assert gsm8k.compute_score("#### $18", "$18") == 1.0


def test_gsm8k_flexible_takes_the_last_number_and_format_score_is_for_wrong_ones() -> None:
    assert gsm8k.compute_score("first 3, then 72 apples.", "72", method="flexible") == 1.0
    assert gsm8k.compute_score("no number", "72", method="flexible", format_score=0.1) == 0.0
    assert gsm8k.compute_score("#### 71", "72", format_score=0.1) == 0.1
    with pytest.raises(ValueError, match="no method 'loose'; use 'strict' or 'flexible'"):
        gsm8k.compute_score("#### 71", "72", method="loose")  # type: ignore[arg-type]


def test_gsm8k_ground_truth_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="ground truth 'many' is not a number"):
        gsm8k.compute_score("#### 1", "many")


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"so \boxed{12}", "12"),
        (r"\boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"$\boxed 7$", "7"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\fbox{a{b}c}", "a{b}c"),
        (r"\boxed", None),
        ("12", None),
    ],
)
def test_last_boxed(text: str, boxed: str | None) -> None:
    assert math_boxed.last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("answer", "truth", "is_right"),
    [
        (r"\frac{1}{2}", r"\frac12", True),
        ("0.5", r"\frac{1}{2}", True),
        (r"x^2 + 2x + 1", r"(x+1)^2", True),
        (r"\sqrt{12}", r"2\sqrt{3}", True),
        (r"\{1, 2\}", r"\{2,1\}", True),
        (r"\frac{1}{3}", r"\frac{1}{2}", False),
        ("x + 1", "x - 1", False),
        ("__import__('os').abort()", "12", False),
        ("10", r"10\%", True),
        (r"10\%", "10", True),
        ("10%", r"10\%", True),
        (r"11\%", "10", False),
        ("11", r"10\%", False),
    ],
)
def test_boxed_answers_are_compared_as_mathematics(answer: str, truth: str, is_right: bool) -> None:
    graded = default_compute_score("HuggingFaceH4/MATH-500", rf"Thus \boxed{{{answer}}}.", truth)
    assert graded == {"score": float(is_right), "acc": is_right, "pred": answer}


def test_boxed_answer_is_required() -> None:
    assert default_compute_score("lighteval/MATH", "the answer is 12", "12")["score"] == 0.0


@pytest.mark.parametrize(
    ("solution", "score", "pred"),
    [
        ("Answer: 34", 1.0, "34"),
        ("answer : $34$", 1.0, "34"),
        ("**Answer:** 34", 1.0, "34"),
        (r"Answer: \boxed{34}.", 1.0, "34"),
        ("Answer: 33\nAnswer: 34", 1.0, "34"),
        ("Answer: 34\nAnswer: 33", -1.0, "33"),
        ("34", -1.0, ""),
        ("Answer: 34" + " " * 300, -1.0, ""),
    ],
)
def test_math_dapo_reads_the_last_answer_line(solution: str, score: float, pred: str) -> None:
    for source in ("math_dapo", "aime_2024"):
        assert default_compute_score(source, solution, "34") == {
            "score": score,
            "acc": score > 0,
            "pred": pred,
        }


def test_math_dapo_strict_box() -> None:
    assert math_dapo.compute_score("Answer: 34", "34", strict_box_verify=True)["score"] == -1.0
    assert math_dapo.compute_score(r"\boxed{1,234}", "1234", strict_box_verify=True)["score"] == 1.0


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (" 12\n", "12", 1.0), ("12", 12, 1.0), ("12.", "12", 0.0), ("b", ["a", "b"], 1.0), ("", "12", 0.0),
        ("72", 72.0, 1.0), ("72.0", 72.0, 1.0), ("72", 72.5, 0.0), ("72", [71.0, 72.0], 1.0),
    ],
)  # fmt: skip
def test_exact_match(solution: str, truth: Any, score: float) -> None:
    assert default_compute_score("strop/exact", solution, truth)["score"] == score
    assert default_compute_score("exact/reversal", solution, truth)["score"] == score


def test_unknown_data_source_names_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"no built-in scorer for data_source 'gsm8k'; known: .*openai/gsm8k.*reward.path"
    ):
        default_compute_score("gsm8k", "#### 1", "1")
    assert "openai/gsm8k" in known_data_sources()


def make_row(task: str, **config: Any) -> tuple[dict[str, Any], dict[str, str]]:
    gym = pytest.importorskip("reasoning_gym")  # here: half a second of each process that collects tests
    entry = gym.create_dataset(task, seed=3, size=1, **config)[0]
    return entry, {"reasoning_gym": json.dumps(entry)}


@pytest.mark.parametrize("task", ["chain_sum", "letter_counting", "n_queens", "countdown", "spiral_matrix"])
def test_reasoning_gym_oracle_answer_is_right(task: str) -> None:
    entry, extra_info = make_row(task)
    for text in (entry["answer"], f"I think <answer>1</answer>, no: <answer>\n{entry['answer']}</answer>"):
        graded = default_compute_score(f"reasoning_gym/{task}", text, entry["answer"], extra_info)
        assert (graded["score"], graded["acc"]) == (1.0, True)
    assert default_compute_score(f"reasoning_gym/{task}", "no", entry["answer"], extra_info)["acc"] is False


def test_reasoning_gym_accepts_another_right_expression() -> None:
    entry, extra_info = make_row("countdown")
    reordered = f"({entry['answer']}) * 1".removesuffix(" * 1")
    assert reordered != entry["answer"]
    assert default_compute_score("reasoning_gym/countdown", reordered, "", extra_info)["score"] == 1.0


def test_reasoning_gym_list_form_is_read_as_a_literal() -> None:
    entry, extra_info = make_row("spiral_matrix")
    as_list = str(entry["answer"].split())
    assert default_compute_score("reasoning_gym/spiral_matrix", as_list, "", extra_info)["score"] == 0.1


ATTACK = "__import__('pathlib').Path({!r}).write_text('owned')"


EVALUATING = {
    "binary_matrix", "bitwise_arithmetic", "n_queens", "number_sorting", "spiral_matrix", "string_insertion",
} | reasoning_gym.EXPRESSION_TASKS  # fmt: skip


@pytest.mark.parametrize("task", sorted(EVALUATING))
@pytest.mark.parametrize("place", ["response", "answer", "both", "problem", "integrand"])
def test_reasoning_gym_evaluates_neither_what_the_model_wrote_nor_the_row(
    task: str, place: str, tmp_path: Path
) -> None:
    entry, _ = make_row(task)
    mark = tmp_path / "owned"
    attack = ATTACK.format(str(mark))
    if place in ("answer", "both"):
        entry["answer"] = attack
    elif place in entry["metadata"]:
        entry["metadata"][place] = attack
    response = attack if place in ("response", "both") else "[1, 2]" if task == "number_sorting" else "1"
    graded = default_compute_score(
        f"reasoning_gym/{task}", response, "", {"reasoning_gym": json.dumps(entry)}
    )
    assert not mark.exists()
    assert place != "response" or graded["score"] <= 0.1


def test_every_reasoning_gym_module_that_evaluates_is_disarmed() -> None:
    found = set()
    for task, (cls, _) in importlib.import_module("reasoning_gym.factory").DATASETS.items():
        module = sys.modules[cls.__module__]
        tree = ast.parse(Path(module.__file__ or "").read_text())
        scorers = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)]
        scorers = [f for f in scorers if re.match("score|verify|parse|is_|check", f.name.lstrip("_"))]
        called = [n.func for f in scorers for n in ast.walk(f) if isinstance(n, ast.Call)]
        names = {one.id for one in called if isinstance(one, ast.Name)}
        attributes = {
            (getattr(one.value, "id", ""), one.attr) for one in called if isinstance(one, ast.Attribute)
        }
        assert not names & {"exec", "sympify", "__import__"}
        parsers = {base for base, name in attributes if name in ("parse_expr", "sympify", "eval", "exec")}
        reasoning_gym._disarm(module)
        assert vars(module)["eval"] is reasoning_gym._evaluate
        assert all(vars(module)[base].parse_expr is reasoning_gym._parse for base in parsers)
        if "sympy" in str(getattr(vars(module).get("parse_expr"), "__module__", "")):
            raise AssertionError(f"{task} keeps sympy's parser")
        if parsers or names & {"eval", "parse_expr"}:
            found.add(task)
    assert found - {"propositional_logic"} == EVALUATING, (
        "a new task that evaluates needs a row of attacks above"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [("[[1, 0]]", [[1, 0]]), ("((0x10 + 0x3) << 1)", 38), ("(7 - -2) * 3", 27), ("8 >> 1", 4)],
)
def test_what_is_evaluated_for_reasoning_gym_is_literals_and_arithmetic(text: str, value: object) -> None:
    assert reasoning_gym._evaluate(text) == value


@pytest.mark.parametrize(
    ("task", "response"),
    [("prime_factorization", "two"), ("boxnet", "[[]]"), ("coin_flip", "1e400"), ("complex_arithmetic", "nan"),
     ("complex_arithmetic", "inf+nanj"), ("game_of_life_halting", "no idea")],
)  # fmt: skip
def test_an_answer_that_reasoning_gym_cannot_take_is_wrong(task: str, response: str) -> None:
    """The package raises, or says 1: nan is right everywhere, and any text is True."""
    _, extra_info = make_row(task)
    graded = default_compute_score(f"reasoning_gym/{task}", response, "", extra_info)
    assert (graded["score"], graded["acc"]) == (0.0, False)


def test_a_row_that_reasoning_gym_cannot_use_is_an_error() -> None:
    with pytest.raises(KeyError):
        default_compute_score(
            "reasoning_gym/complex_arithmetic", "2", "", {"reasoning_gym": '{"answer": "2"}'}
        )


@pytest.mark.parametrize("text", ["2*(3+4)", "x**2 + 3*x - 1/2", "sin(x)*exp(-x) + C", "-5"])
def test_arithmetic_is_an_expression(text: str) -> None:
    assert reasoning_gym.is_expression(text)


@pytest.mark.parametrize(
    "text",
    ["", "x.real", "f(x)", "open('a')", "sin(x, evaluate=1)", "'a'", "[1]", "lambda: 1", "x if 1 else 2",
     "(1).__class__", "abc", "1j", "x[0]", "1;2", "sin", "9" * 3000, "ｅval(1)"],
)  # fmt: skip
def test_anything_else_is_no_expression(text: str) -> None:
    assert not reasoning_gym.is_expression(text)


def test_reasoning_gym_row_without_entry_is_an_error_that_says_how() -> None:
    with pytest.raises(ValueError, match=r"has no extra_info.reasoning_gym.*prepare.py"):
        default_compute_score("reasoning_gym/chain_sum", "1", "1", {})
    with pytest.raises(ValueError, match="the reasoning-gym package has no task 'sums'; known: "):
        default_compute_score("reasoning_gym/sums", "1", "1", {"reasoning_gym": "{}"})


@pytest.mark.parametrize(
    ("data_source", "answer"),
    [
        ("strop/exact", "4"),
        ("lighteval/MATH", r"\boxed{4}"),
        ("math_dapo", "Answer: 4"),
        ("hiyouga/geometry3k", r"\boxed{4}"),
        ("openai/gsm8k", "#### 4"),
    ],
)
@pytest.mark.parametrize("truth", [None, [], {"answer": "4"}])
def test_a_ground_truth_that_no_answer_equals_is_an_error(
    data_source: str, answer: str, truth: object
) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        default_compute_score(data_source, answer, truth)


@pytest.mark.parametrize("truth", ["", " ", float("nan"), ["4", "5"]])
def test_a_question_in_mathematics_has_one_right_answer(truth: object) -> None:
    for data_source in ("lighteval/MATH", "math_dapo", "hiyouga/geometry3k", "openai/gsm8k"):
        with pytest.raises(ValueError, match=r"ground truth.*check reward_model.ground_truth"):
            default_compute_score(data_source, "", truth)
    for answer, right in ((r"\boxed{4}", ["4"]), (r"\boxed{4}", 4.0), (r"\boxed{\text{nan}}", r"\text{nan}")):
        assert default_compute_score("lighteval/MATH", answer, right)["score"] == 1.0
