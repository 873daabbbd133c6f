"""The reward of the tool example: is the answer the right number? Calling the tool is worth nothing by itself."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """1 for the right number after the last equals sign, else 0.

    `solution_str` is the whole response: calls, results of the tool, and the answer. A result without an answer
    after it scores 0. `acc` and `pred` are recorded with the sample.
    """
    _, sign, pred = solution_str.rpartition("=")
    is_right = bool(sign) and pred == ground_truth
    return {"score": float(is_right), "acc": is_right, "pred": pred[:20] if sign else ""}
