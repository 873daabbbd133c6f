"""Answers to a prompt, scored in one call; where it fails as a whole, without those that it fails for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from strop.rewards.concurrent_calls import CallResult
from strop.rewards.outcome import Outcome

Answers = Mapping[int, Mapping[str, Any]]
"""Calls of single answers (wire.py), by the index of the answer in its group."""
Score = Callable[[Sequence[Mapping[str, Any]]], Awaitable[CallResult]]
"""Scores answers in one call."""


async def score_answers(answers: Answers, score: Score) -> dict[int, Outcome]:
    """The outcome of each answer.

    Where a call of all fails as a whole, the answers that it fails for are left out, and the others scored together.
    """
    if not answers:
        return {}
    left_out: dict[int, Outcome] = {}
    result = await score([*answers.values()])
    if isinstance(result, Outcome) and len(answers) > 1:
        left_out, result = await _without_bad(answers, score, result)
    rest = [index for index in answers if index not in left_out]
    outcomes = [result] * len(rest) if isinstance(result, Outcome) else result
    return {**left_out, **dict(zip(rest, outcomes, strict=True))}


async def _without_bad(
    answers: Answers, score: Score, failed: Outcome
) -> tuple[dict[int, Outcome], CallResult]:
    """The answers that a call of all fails for, each with its outcome, and the result for the others.

    Each is tried alone. Where several fail so, or none, the function may need more than one answer: then the call
    is made without one after the other of these. What no such try can tell apart failed as a whole.
    """

    def but(*indices: int) -> list[Mapping[str, Any]]:
        return [answer for index, answer in answers.items() if index not in indices]

    alone = await asyncio.gather(*(score([answer]) for answer in answers.values()))
    bad = {
        index: outcome for index, outcome in zip(answers, alone, strict=True) if isinstance(outcome, Outcome)
    }
    if len(bad) != 1 and len(answers) > 2 and failed.kind != "timeout":
        for index in bad or answers:
            result = await score(but(index))
            if not isinstance(result, Outcome):
                return {index: failed}, result
    return (bad, await score(but(*bad))) if 0 < len(bad) < len(answers) else ({}, failed)
