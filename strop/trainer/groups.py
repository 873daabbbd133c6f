"""Which groups of samples can teach: the filter of DAPO's dynamic sampling, and what a sampler learns of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.algorithms.config import FilterGroupsConfig
from strop.workers.reports import EpisodeReport

SOLVED, FAILED, EQUAL, EASY, HARD, UNSCORED = (
    "solved by every sample",
    "failed by every sample",
    "equal rewards",
    "easier than the band",
    "harder than the band",
    "fewer than two samples were scored",
)
"""Why a group is left out; `judge` gives one of them."""
CAUSES = (SOLVED, FAILED, EQUAL, EASY, HARD, UNSCORED)
SURPLUS = "surplus of dynamic sampling"


@dataclass(frozen=True, kw_only=True)
class Group:
    """The samples of one prompt, judged."""

    uid: str
    """Of the prompt's visit."""
    cause: str
    """Why it is left out; empty where it is trained on."""


def judge(reports: Sequence[EpisodeReport], settings: FilterGroupsConfig, *, on_error: str) -> list[Group]:
    """Every group of these samples, in the order of their first samples.

    A group is left out where all its numbers are equal (at least 1: solved, at most 0: failed, else equal), or
    where their mean is outside the band [lowest_mean, highest_mean].

    Args:
        reports: samples, those of a prompt with the same uid.
        settings: which number is judged, and the band.
        on_error: see `EpisodeReport.reward`; samples without a reward are not judged.
    """
    numbers: dict[str, list[float]] = {}
    for report in reports:
        held = numbers.setdefault(report.uid, [])
        reward = report.reward(on_error=on_error)
        if reward is not None:
            accuracy = report.accuracy
            held.append(reward if settings.metric == "score" or accuracy is None else accuracy)
    return [Group(uid=uid, cause=_cause(held, settings)) for uid, held in numbers.items()]


def _cause(numbers: Sequence[float], settings: FilterGroupsConfig) -> str:
    if len(numbers) < 2:
        return UNSCORED
    lowest, highest = min(numbers), max(numbers)
    if lowest == highest:
        return SOLVED if lowest >= 1 else FAILED if highest <= 0 else EQUAL
    mean = sum(numbers) / len(numbers)
    if settings.highest_mean is not None and mean > settings.highest_mean:
        return EASY
    if settings.lowest_mean is not None and mean < settings.lowest_mean:
        return HARD
    return ""
