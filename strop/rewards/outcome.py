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
    token_rewards: Sequence[tuple[int, float]] = ()
    """Parts of the score that belong to single tokens, as a reward manager gives them: the place in the response, and
    the reward. The rest of the score belongs to the last token."""
    usage: Mapping[str, float] = field(default_factory=dict)
    """Resources used by scoring, by name (`judge/requests`); added over samples in metrics."""
    service: str = ""
    """Full key of the setting with the address of the service that gave no score, and the address:
    `reward.judge.base_url=http://127.0.0.1:8000/v1`. Empty where functions gave this outcome."""
    remedy: str | None = None
    """Advice about the error. None: as kind and service tell; empty: the error says it itself."""

    def __post_init__(self) -> None:
        parts = {
            storable_text(name, max_chars=_MAX_NAME_CHARS): usable_part(value)
            for name, value in self.parts.items()
        }
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "error", storable_text(self.error, max_chars=MAX_TEXT_CHARS))
        rewards = tuple((int(place), float(reward)) for place, reward in self.token_rewards)
        object.__setattr__(self, "token_rewards", rewards)
        object.__setattr__(self, "seconds", finite(self.seconds) or 0.0)
        if self.kind == "score":
            if self.score is None or usable(self.score) is None or self.error:
                raise ValueError(f"a scored outcome needs a finite score and no error, got {self!r}")
            if self.fallback_score is not None:
                raise ValueError(f"a scored outcome needs nothing in place of its score, got {self!r}")
        elif self.score is not None or not self.error or self.token_rewards:
            raise ValueError(
                f"an outcome of kind {self.kind!r} needs an error sentence, no score and no token_rewards, got "
                f"{self!r}"
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
    line = f"reward: {sum(outcome.kind == 'score' for outcome in outcomes)} ok"
    is_ours = [
        outcome.kind == "timeout" and not outcome.service and not outcome.remedy for outcome in outcomes
    ]
    if any(is_ours):
        line += f", {sum(is_ours)} timeout (>{timeout_s:g} s)"
    others = [outcome for outcome, is_known in zip(outcomes, is_ours, strict=True) if not is_known]
    for kind in ("timeout", "error", "infrastructure"):
        line += _counted_errors([outcome.error for outcome in others if outcome.kind == kind], kind)
    return line


def _counted_errors(errors: Sequence[str], kind: str) -> str:
    """The count of these errors, and the most frequent among them; empty where there are none."""
    if not errors:
        return ""
    groups = _groups(errors)
    same = groups[0]
    most, times = Counter(same).most_common(1)[0]
    text = most if times == len(same) else f"{most}, and alike with other values"
    if len(groups) > 1:
        text = f"{len(same)} times {text}; {len(groups) - 1} other error{'s' if len(groups) > 2 else ''}"
    return f", {len(errors)} {kind} ({text})"


def _groups(errors: Sequence[str]) -> list[list[str]]:
    """Errors of one cause together, the largest group first."""
    groups: dict[object, list[str]] = {}
    for error in errors:
        groups.setdefault(_error_group(error), []).append(error)
    return sorted(groups.values(), key=len, reverse=True)


def causes(outcomes: Sequence[Outcome], *, repair: str) -> list[tuple[str, str]]:
    """The most frequent error of each remedy, and the remedy, which is empty where the error says it itself; that of
    most outcomes first.

    Args:
        outcomes: of any kind.
        repair: the remedy for a function that fails.
    """
    errors: dict[tuple[str, ...], list[str]] = {}
    for outcome in outcomes:
        if outcome.kind != "score":
            remedy = _remedy(outcome, repair) if outcome.remedy is None else outcome.remedy
            cause = (remedy,) if remedy else (remedy, outcome.kind, outcome.service)
            errors.setdefault(cause, []).append(outcome.error)
    ordered = sorted(errors.items(), key=lambda entry: len(entry[1]), reverse=True)
    return [(Counter(_groups(of_cause)[0]).most_common(1)[0][0], cause[0]) for cause, of_cause in ordered]


def remedies(outcomes: Sequence[Outcome], *, repair: str) -> str:
    """Advice about the outcomes without a score, after a text that says their errors: a clause for each cause as of
    `causes`, which begins with its error where there are several."""
    found = causes(outcomes, repair=repair)
    if len(found) == 1:
        return found[0][1] or "do what the error says"
    return "; ".join(f"{error}: {remedy}" if remedy else error for error, remedy in found)


def _remedy(outcome: Outcome, repair: str) -> str:
    setting, _, address = outcome.service.partition("=")
    section = setting.rpartition(".")[0]
    match outcome.kind, bool(outcome.service):
        case "timeout", False:
            return "make the function faster, or raise reward.timeout_s"
        case "timeout", True:
            return f"raise {section}.timeout_s, or have {address} asked less at a time ({section}.max_concurrent)"
        case "infrastructure", False:
            return (
                "see to what scoring asks for, as its error says: a service that runs and is reached from here, a "
                "sandbox that starts (`strop sandbox check`); the function need not change"
            )
        case "infrastructure", True:
            return (
                f"see to what the error says: {address} must run, and take these requests from here; or set {setting} "
                f"to a service that does"
            )
        case _, True:
            return f"look at what {address} answers, and at the settings in {section}"
    return repair


def check_failed_share(outcomes: Sequence[Outcome], *, max_failed_share: float, timeout_s: float) -> None:
    """Raise RewardError when more than the given share of the outcomes carries no score."""
    failed = sum(outcome.kind != "score" for outcome in outcomes)
    if failed > max_failed_share * len(outcomes):
        raise RewardError(
            f"{failed} of {len(outcomes)} samples could not be scored, more than reward.max_failed_share = "
            f"{max_failed_share:g} allows ({summarize(outcomes, timeout_s=timeout_s)}): "
            f"{remedies(outcomes, repair='repair the reward function')}; or raise the limit if these failures are "
            f"expected. A run that is continued (--resume) reads the reward file anew (--accept-changes), and takes "
            f"other values of reward.on_failure, reward.failed_score and reward.max_failed_share"
        )
