"""Rules of dynamic sampling: the groups of samples that can teach.

Source: Yu et al. 2025, arXiv:2503.14476, section 3.2, for groups of equal rewards.
"""

from __future__ import annotations

from strop.algorithms.dynamic_sampling_config import FilterGroupsConfig
from strop.algorithms.group_functions import SampleGroup
from strop.algorithms.group_functions.calls import filter_cause
from strop.rewards.passing import passes

SOLVED, FAILED, EQUAL, EASY, HARD, UNSCORED = (
    "solved by every sample",
    "failed by every sample",
    "equal rewards",
    "easier than the band",
    "harder than the band",
    "fewer than two samples were scored",
)
"""Reason for leaving a group out."""
CAUSES = (SOLVED, FAILED, EQUAL, EASY, HARD, UNSCORED)


def left_out_for(group: SampleGroup, settings: FilterGroupsConfig) -> str:
    """Reason for which a group of samples is left out of training; empty where it is trained on.

    It is left out where fewer than two samples were scored, where all its numbers are equal (solved where every sample
    passes, failed where none does, else equal), where their mean is outside the band [lowest_mean, highest_mean], or
    where the filter of the user's own says so.

    Args:
        group: the samples of one prompt that have a reward.
        settings: which number is judged, the band, and the filter.
    """
    numbers = group.rewards if settings.metric == "score" else group.accuracies
    if len(numbers) < 2:
        return UNSCORED
    lowest, highest = min(numbers), max(numbers)
    if lowest == highest:
        verdicts = {passes(reward, parts) for reward, parts in zip(group.rewards, group.parts, strict=True)}
        return SOLVED if verdicts == {True} else FAILED if verdicts == {False} else EQUAL
    mean = sum(numbers) / len(numbers)
    if settings.highest_mean is not None and mean > settings.highest_mean:
        return EASY
    if settings.lowest_mean is not None and mean < settings.lowest_mean:
        return HARD
    return filter_cause(settings.filter, group) if settings.filter else ""
