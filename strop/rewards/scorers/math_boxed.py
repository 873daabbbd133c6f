"""Competition maths: the last `\\boxed{...}` of the solution, compared with the ground truth by math-verify.

math-verify's own limits of time are off: they are seconds of the clock, and what runs into them is no grade. A
comparison has a budget instead (budget.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from strop.rewards.scorers.budget import bounded, with_note

MAX_CHARACTERS = 2000
"""Of an answer that is compared as mathematics."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_BRACE = re.compile(r"[{}]")
_PERCENT = re.compile(r"\\?%\s*$")
_SPACE = re.compile(r"\s+|\\[,;:! ]|~")


def last_boxed(text: str) -> str | None:
    """Content of the last complete `\\boxed{...}`; None when there is none."""
    ends = _closing_braces(text)
    for match in reversed(list(_BOX.finditer(text))):
        start = match.end()
        if start >= len(text):
            continue
        if text[start] != "{":  # \boxed 5
            word = text[start:].split("$")[0].split()
            return word[0] if word else None
        if start in ends:
            return text[start + 1 : ends[start]]
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """Position of the closing brace, by the position of the opening one."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            opened.append(match.start())
        elif opened:
            ends[opened.pop()] = match.start()
    return ends


def compare(pred: str, truth: str) -> tuple[bool, str]:
    """True if two LaTeX answers are the same text or the same mathematical object; and a note, where the answer cannot
    be graded."""
    if _SPACE.sub("", pred) == _SPACE.sub("", truth):
        return True, ""
    if len(pred) > MAX_CHARACTERS:
        return (
            False,
            f"not graded: an answer of {len(pred)} characters; at most {MAX_CHARACTERS} are compared",
        )
    from math_verify import parse, verify  # sympy takes seconds to load on a busy machine

    gold = parse(f"\\boxed{{{truth}}}", parsing_timeout=None)  # outside of the budget: not the answer's doing
    # A question for per cent is answered with the sign and without it.
    has_sign = _PERCENT.search(pred) is not None or _PERCENT.search(truth) is not None
    plain = parse(f"\\boxed{{{_PERCENT.sub('', truth)}}}", parsing_timeout=None) if has_sign else []

    def is_same() -> bool:
        answer = parse(f"\\boxed{{{pred}}}", parsing_timeout=None)
        if answer and verify(gold, answer, timeout_seconds=None):
            return True
        if not plain:
            return False
        answer = parse(f"\\boxed{{{_PERCENT.sub('', pred)}}}", parsing_timeout=None)
        return bool(answer) and bool(verify(plain, answer, timeout_seconds=None))

    return bounded(is_same, False) if gold else (False, "")


def start() -> None:
    """Do what the first comparison would do in seconds: load tables of the parser and of the algebra."""
    compare(r"\sqrt{4}\pi + \frac{x^2}{2}", r"\frac{4\pi + x^2}{2}")


def truth_text(ground_truth: object) -> str:
    """The right answer as text, also of a list of one.

    Raises:
        ValueError: it is none, or several, so that every answer would be wrong.
    """
    answers = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    text = str(answers[0]) if len(answers) == 1 else ""
    if text.strip() in ("", "None", "nan") or isinstance(answers[0], Mapping | list | tuple):
        raise ValueError(
            f"the ground truth of a question in mathematics is one text or number, not {ground_truth!r:.100}; check "
            f"reward_model.ground_truth"
        )
    return text


def grade(solution_str: str, ground_truth: object) -> dict[str, Any]:
    """1 when the last boxed answer equals the ground truth, else 0.

    Raises:
        ValueError: as of `truth_text`.
    """
    truth = truth_text(ground_truth)
    pred = last_boxed(solution_str)
    if pred is None:
        return {"score": 0.0, "acc": False, "pred": ""}
    is_right, note = compare(pred, last_boxed(truth) or truth)
    return with_note({"score": float(is_right), "acc": is_right, "pred": pred.strip()}, note)


def compute_score(solution_str: str, ground_truth: object) -> float:
    """The score alone, under the name and with the arguments users import."""
    return float(grade(solution_str, ground_truth)["score"])
