"""Questions answered with a search tool: the last <answer>...</answer>, compared by exact match or by F1 over words.

Normalisation of both sides: Rajpurkar et al. 2016 (SQuAD, arXiv:1606.05250, evaluation script): lower case, without
punctuation, without the articles a, an and the, blanks joined. Search-R1 (Jin et al. 2025, arXiv:2503.09516, section 3)
rewards the exact match with any accepted answer.

    precision = common / words of the answer, recall = common / words of the truth, F1 = 2 p r / (p + r)

where `common` counts each word as often as both have it. Of several accepted answers the best counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from strop.rewards.scorers.tags import last_tagged

PREFIX = "searchR1_"
SOURCES = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
"""Data sets whose rows have the data source searchR1_NAME."""

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """A text as SQuAD compares it."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(pred: str, truth: str) -> float:
    """F1 over the words of two normalised texts; 1 for two empty ones, 0 where one is empty."""
    words, right = pred.split(), truth.split()
    if not words or not right:
        return float(words == right)
    common = (Counter(words) & Counter(right)).total()
    return 2 * common / (len(words) + len(right))


def extract(solution_str: str) -> str | None:
    """Content of the last pair of answer tags; None where there is none."""
    tagged = last_tagged(solution_str)
    return None if tagged is None else tagged.strip()


def grade(
    solution_str: str,
    ground_truth: object,
    method: Literal["em", "f1", "subem"] = "em",
    format_score: float = 0.0,
) -> dict[str, Any]:
    """Score an answer against the accepted ones.

    Args:
        solution_str: the whole response, searches included.
        ground_truth: {"target": answer or answers}, or the answer or answers.
        method: em: equal to one; subem: contains one; f1: the best F1 with one.
        format_score: for an answer in tags that scores less.

    Returns:
        score, acc (exact match; with subem, whether one is contained), pred, em and f1.

    Raises:
        ValueError: there is no accepted answer, or no such method.
    """
    if method not in ("em", "f1", "subem"):
        raise ValueError(f"the search scorer has no method {method!r}; use 'em', 'subem' or 'f1'")
    targets = [normalize(target) for target in _targets(ground_truth)]
    pred = extract(solution_str)
    if pred is None:
        return {"score": 0.0, "acc": False, "pred": "", "em": 0.0, "f1": 0.0}
    answer = normalize(pred)
    is_equal = any(answer == target for target in targets)
    best = max(f1(answer, target) for target in targets)
    contains = any(target and f" {target} " in f" {answer} " for target in targets)
    is_right = is_equal or (method == "subem" and contains)
    score = best if method == "f1" else float(is_right)
    return {
        "score": max(score, format_score), "acc": is_right, "pred": pred, "em": float(is_equal), "f1": best,
    }  # fmt: skip


def _targets(ground_truth: object) -> list[str]:
    accepted = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    targets = (
        list(accepted) if isinstance(accepted, (list, tuple)) else [] if accepted is None else [accepted]
    )
    if not targets:
        raise ValueError(
            f"the ground truth of a search question is an answer, a list of accepted ones, or a dictionary with them "
            f"under 'target', not {ground_truth!r}; check reward_model.ground_truth"
        )
    return [str(target) for target in targets]


def compute_score(
    solution_str: str,
    ground_truth: object,
    method: Literal["em", "f1", "subem"] = "em",
    format_score: float = 0.0,
) -> float:
    """The score alone, under the name and with the arguments users import."""
    return float(grade(solution_str, ground_truth, method, format_score)["score"])
