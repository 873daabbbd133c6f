"""The whole answer must equal the ground truth."""

from __future__ import annotations

from typing import Any


def grade(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """1 when the stripped answer is the ground truth, or one of them when it is a list; else 0."""
    accepted = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    pred = solution_str.strip()
    is_right = any(pred == str(answer).strip() for answer in accepted)
    return {"score": float(is_right), "acc": is_right, "pred": pred}
