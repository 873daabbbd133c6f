"""The timeline of a profiled step as rows of bars: the controller, the ranks of each role, the samples in lanes."""

from __future__ import annotations

from typing import Any

from strop.run.profile.chrome_trace import EPISODE_PARTS, StepTimeline, lanes
from strop.utils.timeline import CONTROLLER, TimelineSpan

MAX_BARS = 4000
"""Longer ones are shown first; the whole timeline is in its file."""


def timeline_rows(timeline: StepTimeline) -> dict[str, Any]:
    """Rows from top to bottom, each with its bars: begin, seconds, category, name; and how many bars were left out."""
    rows: dict[str, list[TimelineSpan]] = {}
    own = [span for span in timeline.spans if span.category not in EPISODE_PARTS]
    for track in sorted({span.track for span in own}, key=lambda track: (track != CONTROLLER, track)):
        name = track.role if track == CONTROLLER else f"{track.role} {track.rank}"
        rows[name] = [span for span in own if span.track == track]
    samples = [span for span in timeline.spans if span.category in EPISODE_PARTS]
    for track in sorted({span.track for span in samples}):
        for lane, span in lanes([span for span in samples if span.track == track]):
            rows.setdefault(f"samples {track.rank}.{lane}", []).append(span)
    every = sorted((span.seconds for spans in rows.values() for span in spans), reverse=True)
    shortest = every[MAX_BARS - 1] if len(every) > MAX_BARS else 0.0
    shown = {name: [span for span in spans if span.seconds >= shortest] for name, spans in rows.items()}
    return {
        "seconds": timeline.seconds,
        "rows": [
            {
                "name": name,
                "bars": [[span.start_s, span.seconds, span.category, span.name] for span in spans],
            }
            for name, spans in shown.items()
        ],
        "num_left_out": len(every) - sum(map(len, shown.values())),
    }
