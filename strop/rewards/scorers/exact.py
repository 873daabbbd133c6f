"""The whole answer must equal the ground truth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def grade(solution_str: str, ground_truth: object) -> dict[str, Any]:
    """1 when the stripped answer is the ground truth, or one of them when it is a list; else 0.

    A column of whole numbers that a file keeps as floats (72.0) is answered by 72.

    Raises:
        ValueError: there is no right answer, so that every answer would be wrong.
    """
    accepted = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    if not accepted or any(answer is None or isinstance(answer, Mapping | list) for answer in accepted):
        raise ValueError(
            f"the ground truth of an exact answer is a text or number, or a list of accepted ones, not "
            f"{ground_truth!r:.100}; check reward_model.ground_truth"
        )
    pred = solution_str.strip()
    is_right = any(pred in _texts(answer) for answer in accepted)
    return {"score": float(is_right), "acc": is_right, "pred": pred}


def _texts(answer: object) -> tuple[str, ...]:
    """The ways in which a right answer may be written."""
    text = str(answer).strip()
    return (text, str(int(answer))) if isinstance(answer, float) and answer.is_integer() else (text,)
