"""The timeline of a step as a Chrome trace: JSON of the trace event format, which ui.perfetto.dev and chrome://tracing
open.

A role is a process of the trace, and a rank a thread of it. The samples of a rollout worker are a process of their own,
whose threads are lanes: in a lane, samples follow one another, each with its answers, tools and rewards inside.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from strop.run.errors import RunError
from strop.utils.safe_read import read_json
from strop.utils.sanitize import storable_text
from strop.utils.timeline import CONTROLLER, Category, Fact, TimelineSpan, Track

_MAX_NAME_CHARS = 120
"""Names of tools come from a model."""
EPISODE_PARTS = ("episode", "answer", "tool", "reward")
"""Categories of samples, many of which go on at the same time on one rank."""


@dataclass(frozen=True, kw_only=True)
class StepTimeline:
    """All spans of a step; their times are seconds since its begin."""

    step: int
    seconds: float
    """Of the step, with its records, validation and checkpoint."""
    spans: tuple[TimelineSpan, ...]
    clock_error_s: float = 0.0
    """Largest possible error in the alignment of the processes' clocks."""


def trace_of(timeline: StepTimeline) -> dict[str, Any]:
    """The document of a timeline."""
    own = [span for span in timeline.spans if span.category not in EPISODE_PARTS]
    samples = [span for span in timeline.spans if span.category in EPISODE_PARTS]
    events: list[dict[str, Any]] = []
    spans: list[dict[str, Any]] = []
    roles = sorted({span.track.role for span in own}, key=lambda role: (role != CONTROLLER.role, role))
    for pid, role in enumerate(roles, start=1):
        events.append(_named("process_name", pid, 0, {"name": role, "role": role}))
        for rank in sorted({span.track.rank for span in own if span.track.role == role}):
            name = "steps" if role == CONTROLLER.role else f"rank {rank}"
            events.append(_named("thread_name", pid, rank + 1, {"name": name, "rank": rank}))
        spans += [_event(span, pid, span.track.rank + 1) for span in own if span.track.role == role]
    for pid, track in enumerate(sorted({span.track for span in samples}), start=len(roles) + 1):
        names = {"name": f"{track.role} {track.rank}: samples", "role": track.role}
        events.append(_named("process_name", pid, 0, names))
        in_lanes = lanes([span for span in samples if span.track == track])
        for lane in sorted({lane for lane, _ in in_lanes}):
            lane_facts: dict[str, Fact] = {"name": f"lane {lane}", "rank": track.rank}
            events.append(_named("thread_name", pid, lane + 1, lane_facts))
        spans += [_event(span, pid, lane + 1) for lane, span in in_lanes]
    spans.sort(key=lambda event: (event["ts"], -event["dur"]))
    of_step = {
        "step": timeline.step,
        "seconds": timeline.seconds,
        "clock_error_s": timeline.clock_error_s,
    }
    return {"traceEvents": events + spans, "displayTimeUnit": "ms", "otherData": of_step}


def lanes(spans: Sequence[TimelineSpan]) -> list[tuple[int, TimelineSpan]]:
    """Lane of each span of episodes, from 0, with the span.

    Parts of an episode lie inside it, in its lane; a part that overlaps another one has a lane of its own.
    """
    ends = {span.episode: (span.start_s, span.end_s) for span in spans if span.category == "episode"}
    open_ends: dict[str, list[float]] = {}  # of the spans of an episode that go on, the innermost last
    lane_of: dict[str, int] = {}
    free: list[tuple[float, int]] = []  # when a lane is free again
    num_lanes = 0
    placed: list[tuple[int, TimelineSpan]] = []
    for span in sorted(
        (_within(span, ends.get(span.episode)) for span in spans), key=lambda s: (s.start_s, -s.end_s)
    ):
        stack = open_ends.get(span.episode, [])
        while stack and stack[-1] <= span.start_s:
            stack.pop()
        if stack and span.end_s <= stack[-1]:
            stack.append(span.end_s)
            placed.append((lane_of[span.episode], span))
            continue
        if free and free[0][0] <= span.start_s:
            _, lane = heapq.heappop(free)
        else:
            lane, num_lanes = num_lanes, num_lanes + 1
        heapq.heappush(free, (span.end_s, lane))
        if not stack:
            open_ends[span.episode], lane_of[span.episode] = [span.end_s], lane
        placed.append((lane, span))
    return placed


def _within(span: TimelineSpan, bounds: tuple[float, float] | None) -> TimelineSpan:
    """The span within these times: parts of an episode are timed by another clock of the same machine."""
    if bounds is None:
        return span
    start_s, end_s = (min(max(time, bounds[0]), bounds[1]) for time in (span.start_s, span.end_s))
    return replace(span, start_s=start_s, end_s=end_s)


def _named(kind: str, pid: int, tid: int, facts: Mapping[str, Fact]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": dict(facts)}


def _event(span: TimelineSpan, pid: int, tid: int) -> dict[str, Any]:
    start_ns, end_ns = round(span.start_s * 1e9), round(span.end_s * 1e9)
    facts = {"sample": span.episode, **span.facts} if span.episode else dict(span.facts)
    return {
        "ph": "X",
        "name": storable_text(span.name, max_chars=_MAX_NAME_CHARS),
        "cat": span.category,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "pid": pid,
        "tid": tid,
        "args": facts,
    }


def read_trace(path: Path) -> StepTimeline:
    """The timeline that a file holds.

    Raises:
        RunError: it cannot be read, or is none that `trace_of` made.
    """
    try:
        document = read_json(path)
        facts = document["otherData"]
        roles: dict[int, str] = {}
        tracks: dict[tuple[int, int], Track] = {}
        spans: list[TimelineSpan] = []
        for event in document["traceEvents"]:
            if event["name"] == "process_name" and event["ph"] == "M":
                roles[int(event["pid"])] = str(event["args"]["role"])
            elif event["ph"] == "M":
                place = int(event["pid"]), int(event["tid"])
                tracks[place] = Track(roles[place[0]], int(event["args"]["rank"]))
            else:
                spans.append(_read_span(event, tracks))
        return StepTimeline(
            step=int(facts["step"]),
            seconds=float(facts["seconds"]),
            spans=tuple(spans),
            clock_error_s=float(facts["clock_error_s"]),
        )
    except OSError as error:
        raise RunError(f"cannot read the timeline {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(
            f"{path} is no timeline of a step ({type(error).__name__}: {error!s:.100}); profile the step again"
        ) from error


def _read_span(event: Mapping[str, Any], tracks: Mapping[tuple[int, int], Track]) -> TimelineSpan:
    facts = {
        str(name): value for name, value in event["args"].items() if isinstance(value, str | int | float)
    }
    start_s, category = float(event["ts"]) / 1e6, event["cat"]
    if category not in get_args(Category):
        raise ValueError(f"unknown category {category!r:.40}")
    return TimelineSpan(
        name=str(event["name"]),
        category=cast(Category, category),
        track=tracks[int(event["pid"]), int(event["tid"])],
        start_s=start_s,
        end_s=start_s + float(event["dur"]) / 1e6,
        episode=str(facts.pop("sample", "")),
        facts=facts,
    )
