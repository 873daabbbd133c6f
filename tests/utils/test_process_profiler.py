"""The profilers of a process: which activities are traced, and that all of them end."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity

from strop.utils import process_profiler, timeline
from strop.utils.device import trace_activities
from strop.utils.timeline import TimelineSpan


@pytest.fixture(autouse=True)
def dropped() -> Iterator[None]:
    yield
    process_profiler.drop()


@pytest.fixture
def memory_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls to CUDA's allocator history, which a machine without CUDA does not have."""
    calls: list[str] = []
    monkeypatch.setattr(process_profiler, "record_memory", lambda: calls.append("record"))
    monkeypatch.setattr(process_profiler, "save_memory", lambda path: calls.append(path.name))
    monkeypatch.setattr(process_profiler, "end_memory", lambda: calls.append("end"))
    return calls


def test_under_nsys_torch_leaves_the_gpu_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    monkeypatch.setattr("torch.profiler.supported_activities", lambda: both)
    monkeypatch.delenv("NSYS_PROFILING_SESSION_ID", raising=False)
    assert trace_activities() == both
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "4711")
    assert trace_activities() == {ProfilerActivity.CPU}


def test_the_trace_is_of_these_activities(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them = {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    monkeypatch.setattr("torch.profiler.profiler.supported_activities", lambda: all_of_them)
    monkeypatch.setattr(process_profiler, "trace_activities", lambda: {ProfilerActivity.CPU})
    assert process_profiler.start("actor-0", memory=False)
    assert process_profiler._running is not None
    assert process_profiler._running.trace.activities == {ProfilerActivity.CPU}


def test_the_history_of_memory_is_saved_and_ends(memory_calls: list[str], tmp_path: Path) -> None:
    process_profiler.start("actor-0", memory=True)
    process_profiler.stop(tmp_path, lambda folder, label, spans: None)
    assert memory_calls == ["record", "memory-actor-0.pickle", "end"]
    assert (tmp_path / "trace-actor-0.json.gz").exists()


def test_the_history_of_memory_ends_after_an_error_of_the_step(memory_calls: list[str]) -> None:
    process_profiler.start("actor-0", memory=True)
    process_profiler.drop()
    assert memory_calls == ["record", "end"]
    assert not timeline.is_recorded()


def test_the_history_of_memory_ends_where_nothing_can_be_written(
    memory_calls: list[str], tmp_path: Path
) -> None:
    def full(folder: Path, label: str, spans: list[TimelineSpan]) -> None:
        raise OSError("no space left on device")

    process_profiler.start("actor-0", memory=True)
    with pytest.raises(OSError, match="no space left"):
        process_profiler.stop(tmp_path, full)
    assert memory_calls == ["record", "end"]


def test_a_trace_that_does_not_start_leaves_nothing_running(
    memory_calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Profiler is already enabled on this thread")

    with monkeypatch.context() as patch:
        patch.setattr("torch.profiler.profile.start", taken)
        with pytest.raises(RuntimeError, match="already enabled"):
            process_profiler.start("actor-0", memory=True)
    process_profiler.drop()
    assert memory_calls == [], "its history has not begun"
    assert process_profiler.start("actor-0", memory=False), "the next run has profilers"


def test_events_are_written_and_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Reading them took as long again as the trace, and left objects that a later step had to collect."""

    def reading(profile: object) -> None:
        raise AssertionError("the events were read")

    monkeypatch.setattr("torch.autograd.profiler.profile._ensure_function_events", reading)
    for step in ("first", "second"):
        process_profiler.start("actor-0", memory=False)
        torch.ones(3).exp()
        process_profiler.stop(tmp_path / step, lambda folder, label, spans: None)
        assert (
            "aten::exp" in gzip.decompress((tmp_path / step / "trace-actor-0.json.gz").read_bytes()).decode()
        )
    assert [str(warning.message) for warning in recwarn] == []
