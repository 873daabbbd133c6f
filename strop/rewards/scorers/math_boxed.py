"""Competition maths: the last `\\boxed{...}` of the solution, compared with the ground truth by math-verify.

math-verify limits its own time with a signal, which works in one thread only and kills nothing that runs in
C; the reward pool's deadline does both, so that limit is off.
"""

from __future__ import annotations

import re
from typing import Any

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_SPACE = re.compile(r"\s+|\\[,;:! ]|~")


def last_boxed(text: str) -> str | None:
    """What stands in the last complete `\\boxed{...}`; None when there is none."""
    for match in reversed(list(_BOX.finditer(text))):
        start = match.end()
        if start >= len(text):
            continue
        if text[start] != "{":  # \boxed 5
            word = text[start:].split("$")[0].split()
            return word[0] if word else None
        depth = 0
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start + 1 : position]
    return None


def are_equal(pred: str, truth: str) -> bool:
    """Whether two LaTeX answers are the same text or the same mathematical object."""
    if _SPACE.sub("", pred) == _SPACE.sub("", truth):
        return True
    from math_verify import parse, verify  # sympy takes seconds to load on a busy machine

    gold = parse(f"\\boxed{{{truth}}}", parsing_timeout=None)
    answer = parse(f"\\boxed{{{pred}}}", parsing_timeout=None)
    return bool(gold) and bool(answer) and bool(verify(gold, answer, timeout_seconds=None))


def grade(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """1 when the last boxed answer equals the ground truth, else 0."""
    pred = last_boxed(solution_str)
    if pred is None:
        return {"score": 0.0, "acc": False, "pred": ""}
    is_right = are_equal(pred, last_boxed(str(ground_truth)) or str(ground_truth))
    return {"score": float(is_right), "acc": is_right, "pred": pred.strip()}


def compute_score(solution_str: str, ground_truth: Any) -> float:
    """The score alone, under the name and with the arguments users import."""
    return float(grade(solution_str, ground_truth)["score"])
