"""What a device does while Python runs: idle share, launches, waits, and the lines of Python that wait."""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.look import Facts, Look

MAX_TRACE_BYTES = 10 << 20


def profiled(look: Look, work: Callable[[], Any], *, trace: Path | None = None, top: int = 12) -> Facts:
    """Idle share of the device, its longest kernels, and calls that wait for it."""
    on_card = look.device == "cuda"
    # Operations of torch are left out on a card: noting them takes longer than a decode step. Calls of CUDA are there.
    activity = ProfilerActivity.CUDA if on_card else ProfilerActivity.CPU
    look.sync()
    with profile(activities=[activity]) as profiler:
        begin = time.perf_counter()
        work()
        look.sync()
        wall = time.perf_counter() - begin
    events: Any = profiler.profiler.kineto_results.events()
    facts = {
        "wall_s": round(wall, 4),
        **_of_device(events, wall if on_card else None, top),
        **_of_host(events),
    }
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
        if trace.stat().st_size > MAX_TRACE_BYTES:
            trace.unlink()
    return facts


def _of_device(events: Any, wall: float | None, top: int) -> Facts:
    counts: Counter[str] = Counter()
    times: Counter[str] = Counter()
    spans = []
    for event in events:
        name, begin, length = event.name()[:90], event.start_ns(), event.duration_ns()
        if event.device_type() == DeviceType.CPU or length <= 0 or event.is_user_annotation():
            continue
        spans.append((begin, begin + length))
        counts[name] += 1
        times[name] += length
    busy = end = 0
    for begin, stop in sorted(spans):
        busy += max(0, stop - max(begin, end))
        end = max(end, stop)
    return {
        "device_busy_s": round(busy / 1e9, 4),
        "device_idle_share": None if wall is None else round(1 - busy / 1e9 / wall, 3),
        "kernels": sum(counts.values()),
        "copies_to_host": sum(count for name, count in counts.items() if "Memcpy DtoH" in name),
        "copies_to_device": sum(count for name, count in counts.items() if "Memcpy HtoD" in name),
        "longest": [
            {"kernel": name, "share": round(time_ns / max(busy, 1), 3), "count": counts[name]}
            for name, time_ns in times.most_common(top)
        ],
    }


def _of_host(events: Any) -> Facts:
    calls: Counter[str] = Counter()
    for event in events:
        if event.device_type() == DeviceType.CPU:
            calls[event.name()] += 1
    waits = {
        name: count for name, count in calls.items()
        if "Synchronize" in name or name == "aten::_local_scalar_dense"
    }  # fmt: skip
    return {
        "launches": sum(n for name, n in calls.items() if "LaunchKernel" in name or "GraphLaunch" in name),
        "graph_launches": calls.get("cudaGraphLaunch", 0),
        "waits": waits,
    }


def waits_by_line(look: Look, work: Callable[[], Any], *, top: int = 15) -> Facts:
    """Lines of strop at which the host waited for the device (torch's synchronization debug mode)."""
    if look.device != "cuda":
        work()
        return {"waits": "only on a card"}
    seen: Counter[str] = Counter()

    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any, **__: Any) -> None:
        if "called a synchronizing" not in str(message):
            return
        frame, line = sys._getframe(1), f"{filename}:{lineno}"
        while frame is not None:
            if "/strop/" in frame.f_code.co_filename:
                line = f"{frame.f_code.co_filename.split('/strop/')[-1]}:{frame.f_lineno}"
                break
            frame = frame.f_back  # type: ignore[assignment]
        seen[line] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"waits": sum(seen.values()), "lines": dict(seen.most_common(top))}
