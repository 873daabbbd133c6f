"""Timeline of this process: timed spans of its work, while they are recorded.

A span lies on a track: the role and the rank that it belongs to. `on_track` sets the track of the spans inside it, and
`span` times a block. Nothing is kept while nothing is recorded, and a block costs about a microsecond then.

Times are those of `time.perf_counter`, one clock for all processes of a machine.

Concurrency: any thread may add spans; one thread at a time starts and stops the recording.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Category = Literal["step", "phase", "call", "compute", "wait", "episode", "answer", "tool", "reward"]
"""step, phase: of the controller. call: a method of a worker; compute: a part of it. episode: a sample from its begin
until it is scored; answer, tool, reward: parts of it. wait: for another role, rank or process."""
Fact = str | int | float
Mark = Callable[[str], AbstractContextManager[object]]
"""Makes a range of this name in the trace of another profiler."""


class Track(NamedTuple):
    """Role and rank of a worker; the controller is a role of its own."""

    role: str
    rank: int = 0


CONTROLLER = Track("controller")


@dataclass(frozen=True, kw_only=True)
class TimelineSpan:
    """One timed operation."""

    name: str
    category: Category
    track: Track
    start_s: float
    """By time.perf_counter."""
    end_s: float
    episode: str = ""
    """Id of the sample of an episode and its parts."""
    facts: Mapping[str, Fact] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.start_s


_spans: list[TimelineSpan] | None = None
"""Spans since `start`; None while nothing is recorded."""
_marks: tuple[Mark, ...] = ()
_track: ContextVar[Track] = ContextVar("track", default=CONTROLLER)


def start() -> bool:
    """Begin to record; False where this process is recorded already."""
    global _spans
    if _spans is not None:
        return False
    _spans = []
    return True


def stop() -> list[TimelineSpan]:
    """End the recording; its spans in the order of their ends."""
    global _spans, _marks
    spans, _spans, _marks = _spans, None, ()
    return spans or []


def is_recorded() -> bool:
    """True between `start` and `stop`."""
    return _spans is not None


def mark_in(marks: tuple[Mark, ...]) -> None:
    """Show the spans of this recording in the traces of other profilers too."""
    global _marks
    _marks = marks


@contextlib.contextmanager
def on_track(track: Track) -> Iterator[None]:
    """Context whose spans belong to this role and rank."""
    token = _track.set(track)
    try:
        yield
    finally:
        _track.reset(token)


@contextlib.contextmanager
def span(name: str, category: Category, **facts: Fact) -> Iterator[None]:
    """The block as a span; also one that ends with an error."""
    spans = _spans
    if spans is None:
        yield
        return
    start_s = time.perf_counter()
    with contextlib.ExitStack() as stack:
        for mark in _marks:
            stack.enter_context(mark(name))
        try:
            yield
        finally:
            spans.append(
                TimelineSpan(
                    name=name,
                    category=category,
                    track=_track.get(),
                    start_s=start_s,
                    end_s=time.perf_counter(),
                    facts=facts,
                )
            )


def add(span: TimelineSpan) -> None:
    """Add a span that was timed elsewhere; nothing while nothing is recorded."""
    if _spans is not None:
        _spans.append(span)
