"""Grade-school maths: the final number after `####`, or the last number of the text.

Only the last 300 characters are read. Numbers are compared as numbers, after commas, dollar signs and a
closing full stop are removed: `#### 72.`, `#### $72` and `#### 72.0` are all 72. The scorer of verl
compares text and scores these 0.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

_TAIL_CHARACTERS = 300
_MARKED = re.compile(r"####\s*(-?\$?\s?-?[0-9.,]+)")
_NUMBER = re.compile(r"-?\$?[0-9.,]*[0-9][0-9.,]*")


def _clean(text: str) -> str | None:
    """The digits of a number as it stands in prose, or None when there is no number in it."""
    digits = re.sub(r"[\s,$]", "", text).rstrip(".")
    try:
        Decimal(digits)
    except InvalidOperation:
        return None
    return digits


def extract(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """The final number of a solution, cleaned; None when there is none.

    strict takes the number after the last `####`, flexible the last number of any kind.
    """
    if method not in ("strict", "flexible"):
        raise ValueError(f"the GSM8K scorer has no method {method!r}; use 'strict' or 'flexible'")
    pattern = _MARKED if method == "strict" else _NUMBER
    numbers = [_clean(match) for match in pattern.findall(solution_str[-_TAIL_CHARACTERS:])]
    return numbers[-1] if numbers else None


def grade(
    solution_str: str,
    ground_truth: object,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, Any]:
    """`score` for the right number, `format_score` for another one, 0 for none."""
    truth = _clean(str(ground_truth))
    if truth is None or not Decimal(truth).is_finite():
        raise ValueError(
            f"the GSM8K ground truth {ground_truth!r} is not a number; check reward_model.ground_truth"
        )
    pred = extract(solution_str, method)
    if pred is None:
        return {"score": 0.0, "acc": False, "pred": ""}
    is_right = Decimal(pred) == Decimal(truth)
    return {"score": score if is_right else format_score, "acc": is_right, "pred": pred}


def compute_score(
    solution_str: str,
    ground_truth: object,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """The score alone, under the name and with the arguments users import."""
    return float(grade(solution_str, ground_truth, method, format_score, score)["score"])
