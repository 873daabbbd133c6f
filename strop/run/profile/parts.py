"""Spans of each process of a profiled step, written by the process itself and joined into the timeline of the step."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from strop.run.profile.chrome_trace import StepTimeline, trace_of
from strop.run.profile.waits import waits_between
from strop.utils.atomic_io import replace_text
from strop.utils.timeline import TimelineSpan, Track

PROFILE = "profile"
"""Folder of profiled steps in a run folder."""
TIMELINE = "timeline.json"
_FOLDER = re.compile(r"step-(\d{6,})")
_PART = "spans-{}.json"


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Clock of a process, as the controller sees it."""

    ahead_s: float
    """Seconds that it is ahead of the controller's."""
    error_s: float
    """Largest possible error of that."""


def clock_of(asked_s: float, told_s: float, answered_s: float) -> Clock:
    """Clock of a process that was asked for its time.

    Args:
        asked_s, answered_s: controller's time before and after.
        told_s: its answer.
    """
    if asked_s <= told_s <= answered_s:  # it may be the same clock, as on one machine
        return Clock(ahead_s=0.0, error_s=answered_s - asked_s)
    return Clock(ahead_s=told_s - (asked_s + answered_s) / 2, error_s=(answered_s - asked_s) / 2)


def step_folder(run: Path, step: int) -> Path:
    """Folder of a profiled step of the run in this folder."""
    return run / PROFILE / f"step-{step:06d}"


def profiled_steps(run: Path) -> list[int]:
    """Steps of the run that have a timeline."""
    try:
        folders = [path for path in (run / PROFILE).iterdir() if (path / TIMELINE).is_file()]
    except OSError:
        return []
    return sorted(int(match[1]) for path in folders if (match := _FOLDER.fullmatch(path.name)))


def write_part(folder: Path, label: str, spans: Sequence[TimelineSpan]) -> None:
    """Write the spans of the process with this label."""
    replace_text(folder / _PART.format(label), json.dumps([asdict(span) for span in spans]))


def missing_parts(folder: Path, labels: Collection[str]) -> list[str]:
    """Labels of these processes whose spans are not in the folder."""
    return sorted(label for label in labels if not (folder / _PART.format(label)).is_file())


def join_parts(
    folder: Path, *, step: int, start_s: float, end_s: float, clocks: Mapping[str, Clock]
) -> StepTimeline:
    """Write the timeline of a step and remove the parts.

    Args:
        folder: of the step.
        step, start_s, end_s: the step, and its begin and end by the controller's clock.
        clocks: of the processes, by their labels; one that is missing is that of the controller.
    """
    spans: list[TimelineSpan] = []
    parts = sorted(folder.glob(_PART.format("*")))
    prefix, suffix = _PART.split("{}")
    for part in parts:
        clock = clocks.get(part.name.removeprefix(prefix).removesuffix(suffix))
        begin_s = start_s if clock is None else start_s + clock.ahead_s
        for record in json.loads(part.read_text(encoding="utf-8")):
            span = TimelineSpan(**{**record, "track": Track(*record["track"])})
            span = replace(span, start_s=span.start_s - begin_s, end_s=span.end_s - begin_s)
            if span.end_s > 0 and span.start_s < end_s - start_s:  # not the profilers' own work
                spans.append(span)
    spans += waits_between(spans, end_s=end_s - start_s)
    timeline = StepTimeline(
        step=step,
        seconds=end_s - start_s,
        spans=tuple(spans),
        clock_error_s=max((clock.error_s for clock in clocks.values()), default=0.0),
    )
    replace_text(folder / TIMELINE, json.dumps(trace_of(timeline), separators=(",", ":")))
    for part in parts:
        part.unlink()
    return timeline
