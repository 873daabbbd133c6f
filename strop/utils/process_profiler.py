"""Profilers of this process during one step: torch's trace, CUDA's memory history, ranges for Nsight and MindStudio.

Every worker of a process asks for them, and the first one decides: a process has one trace, whatever its roles. The
recording of its timeline begins and ends with them, unless the controller lives in the same process and has begun it.

torch records the operations of the thread that starts it, and the kernels of all threads. The parts that need CUDA or
an NPU have not been run on one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strop.utils import timeline
from strop.utils.device import (
    end_memory,
    record_memory,
    save_memory,
    start_capture,
    stop_capture,
    trace_activities,
    trace_range,
)
from strop.utils.timeline import TimelineSpan

if TYPE_CHECKING:
    import torch

WritePart = Callable[[Path, str, list[TimelineSpan]], None]
"""Writes the spans of a process with this label into a folder."""


@dataclass(frozen=True, kw_only=True)
class _Running:
    """Profilers that were started."""

    label: str
    trace: torch.profiler.profile
    records_memory: bool
    owns_timeline: bool


_running: _Running | None = None


def start(label: str, *, memory: bool) -> bool:
    """Start the profilers, unless another worker of this process has; True where they began its timeline.

    Args:
        label: names the files: role and rank.
        memory: record the history of CUDA's allocator.
    """
    global _running
    if _running is not None:
        return False
    import torch  # heavy: asked for only in steps that are profiled

    owns_timeline = timeline.start()
    trace = torch.profiler.profile(
        activities=trace_activities()
    )  # its events are written, and never read here
    trace.start()
    _running = _Running(label=label, trace=trace, records_memory=memory, owns_timeline=owns_timeline)
    if memory:
        record_memory()
    start_capture()
    shown = trace_range()
    marks = (torch.profiler.record_function,) if shown is None else (torch.profiler.record_function, shown)
    timeline.mark_in(marks)
    return owns_timeline


def stop(folder: Path, write_part: WritePart) -> None:
    """Stop the profilers and write their files, unless another worker of this process has.

    Args:
        folder: of the step.
        write_part: writes the spans.
    """
    global _running
    running, _running = _running, None
    if running is None:
        return
    spans = timeline.stop() if running.owns_timeline else []
    with contextlib.ExitStack() as stack:
        if running.records_memory:
            stack.callback(end_memory)
        running.trace.stop()
        stop_capture()
        folder.mkdir(parents=True, exist_ok=True)
        if running.owns_timeline:
            write_part(folder, running.label, spans)
        if running.records_memory:
            save_memory(folder / f"memory-{running.label}.pickle")
        running.trace.export_chrome_trace(str(folder / f"trace-{running.label}.json.gz"))


def drop() -> None:
    """Stop the profilers without a file, after an error of the step."""
    global _running
    running, _running = _running, None
    timeline.stop()
    if running is None:
        return
    if running.records_memory:
        end_memory()
    with contextlib.suppress(RuntimeError):  # torch's profiler may be what failed
        running.trace.stop()
    stop_capture()
