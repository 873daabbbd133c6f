"""Profiled steps: work and waits of each rank, from their timelines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.run.errors import RunError
from strop.run.profile.chrome_trace import StepTimeline, read_trace
from strop.run.profile.parts import TIMELINE, profiled_steps, step_folder
from strop.run.profile.waits import Interval, merged, overlap
from strop.utils.timeline import TimelineSpan, Track

UPDATES = ("update_policy", "update_critic", "update_prm", "update")
"""Methods whose ranks end together, whatever each of them had to do."""


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """Time of a rank in a profiled step."""

    role: str
    rank: int
    busy_s: float
    """In calls and, between them, in answers; less its waits inside of calls."""
    waits_s: Mapping[str, float]
    """By name, the longest first."""


@dataclass(frozen=True, kw_only=True)
class ProfiledStep:
    """A profiled step, summed up."""

    step: int
    seconds: float
    file: Path
    """The timeline."""
    clock_error_s: float
    ranks: tuple[RankTime, ...]
    imbalance_s: float
    """Of the updates, that would be saved if all ranks had as many tokens."""
    offload_s: float
    """In which roles moved to the host, and their devices waited."""


def read_profiled(run: Path, steps: Collection[int]) -> tuple[list[ProfiledStep], list[str]]:
    """The profiled steps of the run in this folder, and a sentence for each of them whose timeline cannot be read.

    Args:
        run: the folder.
        steps: those that count; others were taken back.
    """
    read: list[ProfiledStep] = []
    unreadable: list[str] = []
    for step in profiled_steps(run):
        if step not in steps:
            continue
        file = step_folder(run, step) / TIMELINE
        try:
            read.append(summed_up(read_trace(file), file))
        except RunError as error:
            unreadable.append(f"step {step} was profiled and is left out: {error}")
    return read, unreadable


def summed_up(timeline: StepTimeline, file: Path) -> ProfiledStep:
    """A step from its timeline, which lies in this file."""
    tracks = sorted({span.track for span in timeline.spans if span.category == "call"})
    return ProfiledStep(
        step=timeline.step,
        seconds=timeline.seconds,
        file=file,
        clock_error_s=timeline.clock_error_s,
        ranks=tuple(_time_of(track, timeline) for track in tracks),
        imbalance_s=imbalance(timeline.spans),
        offload_s=_offload_seconds(timeline.spans),
    )


def _time_of(track: Track, timeline: StepTimeline) -> RankTime:
    spans = [span for span in timeline.spans if span.track == track]
    waits = [span for span in spans if span.category == "wait"]
    at_work = merged(_within(span, timeline.seconds) for span in spans if span.category in ("call", "answer"))
    waiting = merged(_within(span, timeline.seconds) for span in waits)
    busy_s = sum(end - start - overlap(waiting, start, end) for start, end in at_work)
    by_name: dict[str, float] = defaultdict(float)
    for span in waits:
        by_name[span.name] += span.seconds
    ordered = sorted(by_name.items(), key=lambda item: -item[1])
    return RankTime(role=track.role, rank=track.rank, busy_s=busy_s, waits_s=dict(ordered))


def _within(span: TimelineSpan, seconds: float) -> Interval:
    """The part of a span that lies in the step."""
    return min(max(span.start_s, 0.0), seconds), min(max(span.end_s, 0.0), seconds)


def imbalance(spans: Sequence[TimelineSpan]) -> float:
    """Seconds of updates in which ranks waited for the one with most tokens: of each update its time, less the share
    that the mean of the ranks' tokens has in the most."""
    seconds = 0.0
    updates = [span for span in spans if span.category == "call" and span.name in UPDATES]
    passes = [span for span in spans if span.category == "compute" and "tokens" in span.facts]
    by_role: dict[str, dict[int, list[TimelineSpan]]] = defaultdict(lambda: defaultdict(list))
    for update in updates:
        by_role[update.track.role][update.track.rank].append(update)
    for ranks in by_role.values():
        for together in zip(*ranks.values(), strict=False):  # the n-th update of every rank is the same one
            tokens = [
                math.fsum(
                    float(part.facts["tokens"])
                    for part in passes
                    if part.track == update.track and update.start_s <= part.start_s <= update.end_s
                )
                for update in together
            ]
            if len(tokens) > 1 and max(tokens) > 0:
                longest = max(update.seconds for update in together)
                seconds += longest * (1 - math.fsum(tokens) / len(tokens) / max(tokens))
    return seconds


def _offload_seconds(spans: Sequence[TimelineSpan]) -> float:
    """Seconds of `offload` on the first rank of every role."""
    return math.fsum(
        span.seconds
        for span in spans
        if span.category == "call" and span.name == "offload" and span.track.rank == 0
    )
