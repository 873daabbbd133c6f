"""The rule of the DAPO recipe: a line `Answer: ...` near the end; 1 when right, -1 when wrong."""

from __future__ import annotations

import re
from typing import Any

from strop.rewards.scorers.budget import with_note
from strop.rewards.scorers.math_boxed import compare, last_boxed, truth_text

_TAIL_CHARACTERS = 300
_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_DECORATION = re.compile(r"^[\s*$]+|[\s*$.]+$|\\text\{\s*\}")


def _plain(answer: str) -> str:
    """The answer without markdown and dollar signs around it, without thousands separators and units."""
    answer = _DECORATION.sub("", answer)
    answer = last_boxed(answer) or answer
    answer = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer)
    return re.sub(r"\^\s*\{?\\circ\}?|\\%|%|\\\$", "", answer).strip()


def grade(solution_str: str, ground_truth: object, strict_box_verify: bool = False) -> dict[str, Any]:
    """+1 or -1, from the last `Answer:` line, or from the last box when strict_box_verify is set.

    Only the last 300 characters are read. Answers that differ as text are compared by math-verify.

    Raises:
        ValueError: as of `truth_text`.
    """
    truth = _plain(truth_text(ground_truth))
    tail = solution_str[-_TAIL_CHARACTERS:]
    if strict_box_verify:
        answer = last_boxed(tail)
    else:
        lines = _ANSWER.findall(tail)
        answer = lines[-1] if lines else None
    if answer is None:
        return {"score": -1.0, "acc": False, "pred": ""}
    pred = _plain(answer)
    is_right, note = compare(pred, truth) if pred else (False, "")
    return with_note({"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": pred}, note)


def compute_score(solution_str: str, ground_truth: object, strict_box_verify: bool = False) -> dict[str, Any]:
    """`grade` under the name users import."""
    return grade(solution_str, ground_truth, strict_box_verify)
