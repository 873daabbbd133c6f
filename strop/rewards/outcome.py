"""Outcome of one attempt to score a sample, and the summary of a step's outcomes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from strop.utils.sanitize import finite, real, storable_text, usable
from strop.utils.sanitize.values import MAX_NUMBER

OutcomeKind = Literal["score", "error", "timeout", "infrastructure"]
KINDS: tuple[OutcomeKind, ...] = ("score", "error", "timeout", "infrastructure")
Value = float | str | bool
"""Types of a part of a reward."""


MAX_TEXT_CHARS = 1 << 20
"""Of one part that is a text."""
_MAX_NAME_CHARS = 200
"""Of the name of a part, which becomes part of the name of a metric."""


class RewardError(ValueError):
    """The reward function cannot be used; the message says why and what to do."""


class RewardUnavailable(RuntimeError):
    """A service that scores could not be reached or did not work, which says nothing about the answer. A reward
    function may raise it; the outcome is then of kind `infrastructure`."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of scoring one sample: a finite score, or the reason why there is none."""

    kind: OutcomeKind
    """`score`: scored. `error`: the function failed or returned no number. `timeout`: it took too long.
    `infrastructure`: a service or machine that scoring needs failed, whatever the answer was."""
    score: float | None = None
    """The reward as the function returned it; None unless kind is `score`."""
    parts: Mapping[str, Value] = field(default_factory=dict)
    """The other entries of the returned dictionary, or one entry per function where there are several. Samples need
    not have the same ones. `acc` says whether the answer passes (passing.py), where something decides that."""
    error: str = ""
    """One sentence; empty when kind is `score`."""
    seconds: float = 0.0
    """Wall-clock time spent in the function, or waiting for a service."""
    fallback_score: float | None = None
    """Score that a sample without one is trained with (`fixed` in reward.on_failure); None: left out of training."""
    usage: Mapping[str, float] = field(default_factory=dict)
    """Resources used by scoring, by name (`judge/requests`); added over samples in metrics."""

    def __post_init__(self) -> None:
        parts = {
            storable_text(name, max_chars=_MAX_NAME_CHARS): usable_part(value)
            for name, value in self.parts.items()
        }
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "error", storable_text(self.error, max_chars=MAX_TEXT_CHARS))
        object.__setattr__(self, "seconds", finite(self.seconds) or 0.0)
        if self.kind == "score":
            if self.score is None or usable(self.score) is None or self.error:
                raise ValueError(f"a scored outcome needs a finite score and no error, got {self!r}")
            if self.fallback_score is not None:
                raise ValueError(f"a scored outcome needs nothing in place of its score, got {self!r}")
        elif self.score is not None or not self.error:
            raise ValueError(
                f"an outcome of kind {self.kind!r} needs an error sentence and no score, got {self!r}"
            )


def usable_part(value: object) -> Value:
    """A part of a reward as it is kept: bool, number or text; numbers beyond 1e15 are infinite, and in no metric."""
    number = real(value)
    if number is None:
        return storable_text(value, max_chars=MAX_TEXT_CHARS)
    if isinstance(value, bool):
        return value
    if abs(number) > MAX_NUMBER:
        return math.copysign(math.inf, number)
    return int(number) if isinstance(value, int) else number


def _error_group(error: str) -> object:
    """Group key of errors of one cause: the exception and its line, whatever value its text repeats."""
    label, raised, message = error.partition(" raised ")
    return (label, message.partition(":")[0], message.rpartition(" at ")[2]) if raised else error


def summarize(outcomes: Sequence[Outcome], *, timeout_s: float) -> str:
    """One line with the count of each kind and the most frequent error of each.

    For example `reward: 1017 ok, 6 timeout (>10 s), 1 error (ZeroDivisionError: division by zero at
    reward.py:41)`. An exception of one line is one kind, whatever value its text repeats.
    """
    counts = Counter(outcome.kind for outcome in outcomes)
    line = f"reward: {counts['score']} ok"
    if counts["timeout"]:
        line += f", {counts['timeout']} timeout (>{timeout_s:g} s)"
    for kind in ("error", "infrastructure"):
        if not counts[kind]:
            continue
        errors: dict[object, list[str]] = {}
        for outcome in outcomes:
            if outcome.kind == kind:
                errors.setdefault(_error_group(outcome.error), []).append(outcome.error)
        same = max(errors.values(), key=len)
        most, times = Counter(same).most_common(1)[0]
        text = most if times == len(same) else f"{most}, and alike with other values"
        if len(errors) > 1:
            text = f"{len(same)} times {text}; {len(errors) - 1} other error{'s' if len(errors) > 2 else ''}"
        line += f", {counts[kind]} {kind} ({text})"
    return line


def check_failed_share(outcomes: Sequence[Outcome], *, max_failed_share: float, timeout_s: float) -> None:
    """Raise RewardError when more than the given share of the outcomes carries no score."""
    failed = sum(outcome.kind != "score" for outcome in outcomes)
    if failed > max_failed_share * len(outcomes):
        raise RewardError(
            f"{failed} of {len(outcomes)} samples could not be scored, more than reward.max_failed_share = "
            f"{max_failed_share:g} allows ({summarize(outcomes, timeout_s=timeout_s)}): repair the reward "
            f"function, or raise the limit if these failures are expected; a run that is continued (--resume) reads "
            f"the reward file anew (--accept-changes), and takes other values of reward.on_failure, "
            f"reward.failed_score and reward.max_failed_share"
        )
