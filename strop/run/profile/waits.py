"""Waits of workers: the gaps between their calls, and who was at work meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from strop.utils.timeline import CONTROLLER, TimelineSpan, Track

SHORTEST_S = 1e-3
"""Shorter gaps are the way of a call to its worker."""
_AT_WORK = ("call", "answer", "wait")
"""Categories during which a worker does not wait for its next call: an engine may answer between calls."""

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, in order and without overlaps."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def overlap(intervals: Sequence[Interval], start_s: float, end_s: float) -> float:
    """Seconds between two times that disjoint intervals cover."""
    return sum(max(0.0, min(end, end_s) - max(start, start_s)) for start, end in intervals)


def waits_between(spans: Sequence[TimelineSpan], *, end_s: float) -> list[TimelineSpan]:
    """A span of category `wait` for each gap between the calls of a worker, from the begin of the step to its end.

    It is named after the other rank or role that was at work during most of the gap, or after the controller where
    nobody was for half of it.
    """
    tracks = sorted({span.track for span in spans if span.category == "call"})
    busy = {
        track: merged(
            (span.start_s, span.end_s) for span in spans if span.track == track and span.category in _AT_WORK
        )
        for track in tracks
    }
    calls = {
        track: merged(
            (span.start_s, span.end_s) for span in spans if span.track == track and span.category == "call"
        )
        for track in tracks
    }
    waits: list[TimelineSpan] = []
    for track in tracks:
        edges = [0.0, *(time for interval in busy[track] for time in interval), end_s]
        for gap_start, gap_end in zip(edges[::2], edges[1::2], strict=True):
            gap_start, gap_end = max(gap_start, 0.0), min(gap_end, end_s)
            if gap_end - gap_start < SHORTEST_S:
                continue
            others = {other: overlap(calls[other], gap_start, gap_end) for other in tracks if other != track}
            waits.append(
                TimelineSpan(
                    name=f"waits for {_most_at_work(track, others, gap_end - gap_start)}",
                    category="wait",
                    track=track,
                    start_s=gap_start,
                    end_s=gap_end,
                )
            )
    return waits


def _most_at_work(track: Track, others: dict[Track, float], seconds: float) -> str:
    """Name of the other worker that worked longest; of equal ones, a rank of the same role."""
    longest = max(others, key=lambda other: (others[other], other.role == track.role), default=None)
    if longest is None or others[longest] < seconds / 2:
        return CONTROLLER.role
    return f"rank {longest.rank}" if longest.role == track.role else longest.role
