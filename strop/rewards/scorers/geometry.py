"""Geometry with pictures: the last `\\boxed{...}`, compared as mathematics, with angles and lengths as plain numbers.

Ground truths of the data set are bare (`65`, `6 \\sqrt{3}`), while answers often carry a degree sign, a unit or the
name of what was asked for (`x = 65^\\circ`, `6\\sqrt{3} \\text{ cm}`); these are taken off both sides.
"""

from __future__ import annotations

import re
from typing import Any

from strop.rewards.scorers.budget import with_note
from strop.rewards.scorers.math_boxed import MAX_CHARACTERS, compare, last_boxed, truth_text

_DEGREES = re.compile(
    r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°|\s*\\?(?:text|mathrm)?\{?\s*degrees?\s*\}?$", re.IGNORECASE
)
_UNIT = re.compile(
    r"\s*(?:\\(?:text|mathrm|mbox)\s*\{\s*(?:square\s+)?(?:units?|cm|mm|m|km|in|ft|yd|inches|inch|feet|foot|meters?|yards?)"
    r"\s*\}(?:\^\{?[23]\}?)?|\b(?:square\s+)?units?)\s*\.?$",
    re.IGNORECASE,
)
_NAMED = re.compile(r"^(?:m\s*)?(?:\\angle\s*)?[A-Za-z]{1,4}\s*=\s*(?=\S)")
_BLANKS = re.compile(r"\s+")


def _bare(answer: str) -> str:
    """The answer without its name, degree signs and unit."""
    if len(answer) > MAX_CHARACTERS:
        return answer
    answer = _BLANKS.sub(" ", answer)  # runs of blanks take the expressions below quadratic time
    text = _NAMED.sub("", answer.strip().strip("$").strip())
    return _DEGREES.sub("", _UNIT.sub("", text)).strip()


def _has_form(text: str) -> bool:
    """`<think> ... </think> ... \\boxed{ ... }`, each after the one before, in one pass."""
    at = 0 if text.startswith("<think>") else -1
    for mark in ("<think>", "</think>", "\\boxed{", "}"):
        at = text.find(mark, at) if at >= 0 else -1
        at = at + len(mark) if at >= 0 else -1
    return at >= 0


def grade(solution_str: str, ground_truth: object, format_score: float = 0.0) -> dict[str, Any]:
    """(1 - format_score) for the right boxed answer, and format_score for a text between think tags before it.

    Raises:
        ValueError: format_score is no share; or as of `truth_text`.
    """
    if not 0 <= format_score <= 1:
        raise ValueError(
            f"format_score is {format_score}; it is the share of the score for the form, from 0 to 1"
        )
    boxed = last_boxed(solution_str)
    right_answer = truth_text(ground_truth)
    truth = _bare(last_boxed(right_answer) or right_answer)
    pred = "" if boxed is None else _bare(boxed)
    is_right, note = compare(pred, truth) if pred else (False, "")
    score = (1 - format_score) * is_right + format_score * _has_form(solution_str.strip())
    return with_note({"score": float(score), "acc": is_right, "pred": pred}, note)


def compute_score(solution_str: str, ground_truth: object, format_score: float = 0.0) -> float:
    """The score alone, under the name and with the arguments users import."""
    return float(grade(solution_str, ground_truth, format_score)["score"])
