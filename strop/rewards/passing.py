"""Pass verdict of answers: the `acc` of a scored outcome.

A reward is not a verdict: a weighted sum, or a score with steps between wrong and right, says nothing of passing. What
decides is, in this order: the function that reward.pass_by names, from reward.pass_threshold on; the `acc` that a
function, a judge or an environment gives; a single reward of 0 or 1. Otherwise nothing decides, and the outcome has no
`acc`: there is no pass rate then, only a mean reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from strop.rewards.config import RewardConfig
from strop.rewards.outcome import Outcome, Value
from strop.utils.sanitize import finite

ACC = "acc"
"""The part that says whether an answer passes."""
PASS_THRESHOLD = 0.5
"""An answer passes when its `acc` is above this."""


def passes(score: float, parts: Mapping[str, Value]) -> bool | None:
    """True if an answer with this score passes; None where nothing decides that. A score without any part is a single
    reward."""
    acc = finite((parts or with_binary_acc(score, {})).get(ACC))
    return None if acc is None else acc > PASS_THRESHOLD


def with_verdict(outcome: Outcome, config: RewardConfig) -> Outcome:
    """The outcome with the `acc` of what decides; without one where reward.pass_by names a function that did not apply
    to this sample."""
    if outcome.score is None:
        return outcome
    if config.pass_by:
        parts = {name: value for name, value in outcome.parts.items() if name != ACC}
        is_unnamed = config.uses_functions and not config.functions and not config.services
        deciding = outcome.score if is_unnamed else finite(outcome.parts.get(config.pass_by))
        if deciding is not None:
            parts[ACC] = deciding >= config.pass_threshold
        return replace(outcome, parts=parts)
    if not config.is_single:
        return outcome
    names = [*(function.part for function in config.functions), *config.services]
    score = finite(outcome.parts.get(names[0])) if names else outcome.score
    parts = with_binary_acc(score, outcome.parts)
    return outcome if parts == outcome.parts else replace(outcome, parts=parts)


def with_binary_acc(score: float | None, parts: Mapping[str, Value]) -> dict[str, Value]:
    """The parts of a reward that stands alone: its score is `acc` where it is 0 or 1 and no other one is given."""
    return {ACC: score, **parts} if score in (0.0, 1.0) and ACC not in parts else dict(parts)
