"""The schedule of a run whose generation is ahead of training: order of the completed groups, and the policy version
of each sampled token.

With it, the settings and the seed, such a run is made again: everything else follows from them by rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from strop.run.events import EventLog

KIND = "schedule"

Spans = Mapping[str, Sequence[Sequence[int]]]
"""Spans of one prompt, by the id of the request (without the prompt's): pairs of a policy version and the number of
consecutive tokens it sampled."""


@dataclass(frozen=True, kw_only=True)
class StepSchedule:
    """Schedule of one step."""

    ended: tuple[str, ...]
    """Uids of the groups that ended for it, in the order in which it looked at them; some wait for a later step."""
    spans: Mapping[str, Spans]
    """Spans by uid, of the groups that it trained or left out."""


@dataclass(frozen=True, kw_only=True)
class ScheduleDifference:
    """First difference of two schedules."""

    step: int
    text: str
    """The difference, in words."""


def write_schedule(events: EventLog, step: int, schedule: StepSchedule) -> None:
    """Add that of a step to the log of a run."""
    events.append(KIND, step, ended=list(schedule.ended), spans=schedule.spans)


def read_schedule(events: EventLog) -> dict[int, StepSchedule]:
    """Schedules by step; empty for a run whose generation was not ahead."""
    return {
        event["step"]: StepSchedule(ended=tuple(event["ended"]), spans=event["spans"])
        for event in events.read(KIND)
    }


def versions_in_spans(versions: Iterable[int]) -> list[list[int]]:
    """Runs of equal versions, as pairs of the version and its length."""
    spans: list[list[int]] = []
    for version in versions:
        if spans and spans[-1][0] == version:
            spans[-1][1] += 1
        else:
            spans.append([version, 1])
    return spans


def compare_schedules(
    a: Mapping[int, StepSchedule], b: Mapping[int, StepSchedule], *, until: int
) -> ScheduleDifference | None:
    """The first difference in the steps up to this one; None where there is none, or a run has no schedule."""
    for step in sorted(step for step in a.keys() & b.keys() if step <= until):
        text = _difference(a[step], b[step])
        if text:
            return ScheduleDifference(step=step, text=text)
    return None


def _difference(a: StepSchedule, b: StepSchedule) -> str:
    if set(a.spans) != set(b.spans):
        first, second = (sorted(set(left.spans) - set(right.spans)) for left, right in ((a, b), (b, a)))
        return f"took other prompts: {', '.join(first[:3]) or 'none'} and {', '.join(second[:3]) or 'none'}"
    for uid, spans in a.spans.items():
        for name in sorted(spans.keys() & b.spans[uid].keys()):
            mine, theirs = ([list(span) for span in side[name]] for side in (spans, b.spans[uid]))
            if [version for version, _ in mine] != [version for version, _ in theirs] or mine[:-1] != theirs[
                :-1
            ]:
                return f"{uid}/{name} was sampled by {_spans_text(mine)} and by {_spans_text(theirs)}"
    return ""


def _spans_text(spans: Sequence[Sequence[int]]) -> str:
    return ", then ".join(f"version {version} ({count} tokens)" for version, count in spans) or "none"
