"""Seconds of a call of generation that it would not have needed: its tail, and the wait for the last rewards
(torch-free)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.workers.reports import EpisodeReport

TAIL, REWARDS = "tail", "rewards"
"""Names of the two waits."""


def generation_waits(reports: Sequence[EpisodeReport]) -> dict[str, float]:
    """Both waits of samples that were begun at the same time.

    tail: the time from the begin to the last token, less the time that all tokens would have taken at the rate that
    generation had until half of the samples had ended; 0 where it kept that rate. Tokens of a sample are taken to be
    spread evenly over its time.
    rewards: from the last token to the last score.

    Args:
        reports: of the samples of one call; those that nobody timed are left out.
    """
    timed = [(report.times, report.num_response_tokens) for report in reports if report.times.played_s > 0]
    if not timed:
        return {}
    ends = sorted(times.played_s for times, _ in timed)
    half_s, last_s = ends[(len(ends) - 1) // 2], ends[-1]
    num_tokens = sum(count for _, count in timed)
    in_half = math.fsum(count * min(half_s / times.played_s, 1.0) for times, count in timed)
    tail_s = last_s - num_tokens * half_s / in_half if in_half else 0.0
    return {
        TAIL: max(0.0, tail_s),
        REWARDS: max(0.0, max(times.scored_s for times, _ in timed) - last_s),
    }


def sum_of_waits(calls: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The waits of several calls, one after another."""
    total: dict[str, float] = {}
    for waits in calls:
        total |= {name: total.get(name, 0.0) + seconds for name, seconds in waits.items()}
    return total
