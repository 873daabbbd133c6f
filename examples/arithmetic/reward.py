"""The reward of the arithmetic example: is the answer the right number?"""

from __future__ import annotations

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """1 for the right number, else 0.

    `score` is what training uses. The other entries are recorded with the sample and logged in validation:
    `acc` is whether the answer is right, `pred` the answer that was read, `is_number` shows early whether the
    model has understood what kind of answer is wanted.
    """
    match = re.fullmatch(r"\s*(-?\d{1,9})\s*", solution_str)
    pred = match.group(1) if match else ""
    is_right = match is not None and int(pred) == int(ground_truth)
    return {"score": float(is_right), "acc": is_right, "pred": pred, "is_number": match is not None}
