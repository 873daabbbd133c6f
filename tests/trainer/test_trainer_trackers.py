"""Trackers: what they show and write, and that a resume replaces the steps it repeats."""

from __future__ import annotations

import io
import json
import math
import os
import queue
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from rich.console import Console

from strop.observability.reward_curve import find
from strop.observability.trackers.console import ConsoleTracker, duration, headline
from strop.observability.trackers.group import TrackerGroup, check_trackers, trackers
from strop.observability.trackers.setup import JsonlTracker, TrackerSetup, read_metrics
from strop.protocol.trajectory import Prompt
from strop.rewards import Outcome
from strop.run import RunError
from strop.utils import registry
from strop.workers.episodes import Episode
from strop.workers.progress import RolloutProgress, Tally

METRICS = {
    "critic/rewards/mean": 0.5314, "critic/score/mean": 9.0, "val-core/pass_rate": 0.75,
    "val-core/mean_reward": 0.8, "val-core/c/acc/mean@1": 1.0, "actor/entropy": 0.25, "response_length/mean": 12.34,
    "perf/throughput": 1234.4, "actor/lr": 1e-5,
}  # fmt: skip
LINE = "reward 0.531  pass 75.0%  entropy 0.250  length 12.3  1,234 tok/s"


def test_headline_shows_what_people_watch() -> None:
    assert headline(METRICS) == LINE
    assert headline({"actor/lr": 1.0}) == ""
    assert headline({"train/loss": 0.5}) == "loss 0.5000"
    assert headline({"prefer/loss": 0.5, "prefer/rewards/accuracies": 0.75}) == "loss 0.5000  accuracy 75.0%"
    assert headline({"critic/score/mean": 1.0}) == "reward 1.000", "the score where there is no reward"
    assert find({"x": 1.0}, ("y*",)) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3725, "1:02:05"), (90000, "25:00:00")]
)
def test_duration_is_hours_minutes_seconds(seconds: float, text: str) -> None:
    assert duration(seconds) == text


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def console_tracker(
    *, total_steps: int, first_step: int = 0, label: str = "train", console: Console, clock: Clock
) -> ConsoleTracker:
    setup = TrackerSetup(
        folder=Path(), total_steps=total_steps, resume_step=first_step, label=label, console=console
    )
    return ConsoleTracker(setup, clock=clock)


def plain_console() -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, force_terminal=False, width=40), output


def test_without_a_terminal_at_most_one_line_a_second_and_always_the_last() -> None:
    console, output = plain_console()
    clock = Clock()
    tracker = console_tracker(total_steps=10, label="rl", console=console, clock=clock)
    for step in range(1, 8):
        clock.now += 0.4  # steps end at 0.4, 0.8, ... s: lines at 0.4, then 1.6 and 2.8
        tracker.log(step, {"critic/rewards/mean": step / 10})
    tracker.close()
    tracker.close()
    assert output.getvalue().splitlines() == [
        "rl step 1/10  reward 0.100  eta 0:00:04",
        "rl step 4/10  reward 0.400  eta 0:00:02",
        "rl step 7/10  reward 0.700  eta 0:00:01",
    ]
    console, output = plain_console()
    tracker = console_tracker(total_steps=2, console=console, clock=clock)
    for step in (1, 2):
        tracker.log(step, METRICS)
    assert output.getvalue().splitlines() == [
        f"train step 1/2  {LINE}  eta 0:00:00",
        f"train step 2/2  {LINE}  eta 0:00:00",
    ], "the final step is not held back, and long lines are not broken"
    tracker.close()
    assert len(output.getvalue().splitlines()) == 2


def test_without_a_terminal_a_long_step_says_how_far_it_is_at_most_every_thirty_seconds() -> None:
    (console, output), clock = plain_console(), Clock()
    tracker = console_tracker(total_steps=4, console=console, clock=clock)
    for number in range(1, 8):  # a look every ten seconds
        clock.now += 10
        tracker.note(f"{number} of 9 done")
    tracker.log(1, {"train/loss": 0.5})
    clock.now += 29
    tracker.note("8 of 9 done")  # so soon after the step
    clock.now += 1
    tracker.note("9 of 9 done")
    assert output.getvalue().splitlines() == [
        "train after step 0/4  3 of 9 done",
        "train after step 0/4  6 of 9 done",
        "train step 1/4  loss 0.5000  eta 0:03:30",
        "train after step 1/4  9 of 9 done",
    ]


def test_on_a_terminal_the_line_below_the_bar_says_how_far_a_step_is() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100, color_system=None)
    tracker = console_tracker(total_steps=4, console=console, clock=Clock())
    tracker.note("3 of 9 done")
    assert "3 of 9 done" in output.getvalue()
    tracker.log(1, {"train/loss": 0.5})
    tracker.close()
    assert output.getvalue().rindex("loss 0.5000") > output.getvalue().rindex("3 of 9 done")


def test_what_workers_note_is_shown_while_samples_are_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.workers.progress.PERIOD_S", 0.01)
    shown: queue.SimpleQueue[str] = queue.SimpleQueue()
    progress = RolloutProgress(tmp_path)
    prompt = Prompt(uid="a", row=0, token_ids=(1,), messages=(), data_source="x", ground_truth=None)
    scored = Episode(
        prompt=prompt, sample_index=0, trajectory=None, outcome=Outcome(kind="score", score=1.0, parts={})
    )
    failed = Episode(prompt=prompt, sample_index=1, trajectory=None, failure="x")
    first, second = Tally(tmp_path, rank=0), Tally(tmp_path, rank=1)
    second.add(failed)  # of the call before
    progress.show = shown.put
    with progress.watch(8):
        first.reset()
        assert shown.get(timeout=5) == "0 of 8 episodes done, 0 scored"
        first.add(scored)
        first.add(failed)
        second.reset()
        second.add(scored)
        while (text := shown.get(timeout=5)) != "3 of 8 episodes done, 2 scored":
            assert text.startswith(("0 of", "1 of", "2 of"))
    while not shown.empty():
        shown.get()
    first.add(scored)
    assert shown.empty(), "nobody looks any more"


def test_numbers_that_come_now_and_then_stay_on_the_line() -> None:
    console, output = plain_console()
    tracker = console_tracker(total_steps=9, console=console, clock=Clock())
    tracker.log(0, {"val-core/pass_rate": 0.25})
    tracker.log(1, {"critic/rewards/mean": 0.5})
    tracker.close()
    assert output.getvalue().splitlines() == [
        "train step 0/9  pass 25.0%  eta -:--:--",
        "train step 1/9  reward 0.500  pass 25.0% (step 0)  eta 0:00:00",
    ]


def test_eta_of_a_resumed_run_counts_only_its_own_steps() -> None:
    console, output = plain_console()
    clock = Clock()
    tracker = console_tracker(total_steps=100, first_step=90, console=console, clock=clock)
    clock.now += 60
    tracker.log(91, {})
    tracker.close()
    assert output.getvalue() == "train step 91/100  eta 0:09:00\n"


def test_a_terminal_gets_a_bar_that_ends_with_the_last_numbers() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100, color_system=None)
    tracker = console_tracker(total_steps=4, label="rl", console=console, clock=Clock())
    tracker.log(3, METRICS)
    tracker.close()
    tracker.close()
    screen = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", output.getvalue()).replace("\r", "\n")
    bar, numbers = [line for line in screen.splitlines() if line.strip()][-2:]
    assert bar.startswith("rl ")
    assert "3/4" in bar
    assert "eta 0:00:00" in bar
    assert LINE in numbers


def setup(folder: Path, *, resume_step: int = 0) -> TrackerSetup:
    return TrackerSetup(folder=folder, total_steps=10, resume_step=resume_step, console=plain_console()[0])


def log_steps(folder: Path, name: str, steps: range, value: float, *, resume_step: int = 0) -> None:
    with TrackerGroup([name], setup(folder, resume_step=resume_step)) as group:
        for step in steps:
            group.log(step, {"actor/loss": value + step})


def test_jsonl_lines_of_steps_after_the_resume_point_are_superseded(tmp_path: Path) -> None:
    log_steps(tmp_path, "jsonl", range(6), 0.0)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "actor/lo')  # killed while it wrote
    log_steps(tmp_path, "jsonl", range(4, 8), 100.0, resume_step=3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["actor/loss"]) for line in lines] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 104.0), (5, 105.0), (6, 106.0), (7, 107.0)
    ]  # fmt: skip


def test_a_line_that_cannot_be_encoded_does_not_switch_the_record_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "actor/\\ud83d": 0.5}\n{"step": 2, "actor/loss": 1.0}\n')
    log_steps(tmp_path, "jsonl", range(2, 4), 10.0, resume_step=1)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_an_error_of_the_runs_own_record_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tracker: JsonlTracker, step: int, metrics: object) -> None:
        raise LookupError("a fault of ours")

    monkeypatch.setattr(JsonlTracker, "log", broken)
    with pytest.raises(LookupError, match="a fault of ours"):
        log_steps(tmp_path, "jsonl", range(1), 0.0)
    monkeypatch.setattr(JsonlTracker, "__init__", broken)
    with pytest.raises(TypeError):
        log_steps(tmp_path, "jsonl", range(1), 0.0)


def test_read_metrics_joins_lines_of_a_step_and_gives_numbers_back(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl", resume_step=0)
    tracker.log(2, {"a": math.nan, "b": 1.0})
    tracker.log(1, {"a": math.inf})
    tracker.log(2, {"c": -math.inf})
    tracker.close()
    assert '"a": "nan"' in (tmp_path / "m.jsonl").read_text()
    first, second = read_metrics(tmp_path / "m.jsonl")
    assert first == {"step": 1, "a": math.inf}
    assert math.isnan(second.pop("a"))
    assert second == {"step": 2, "b": 1.0, "c": -math.inf}


def test_jsonl_lines_are_readable_at_once(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "m.jsonl", resume_step=0)
    tracker.log(1, {"a": 1.0})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "a": 1.0}]
    tracker.close()
    with pytest.raises(RunError, match="cannot write .*m.jsonl/x: Not a directory"):
        JsonlTracker(tmp_path / "m.jsonl" / "x", resume_step=0)


def test_tensorboard_forgets_the_steps_a_resume_repeats(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_steps(tmp_path, "tensorboard", range(1, 6), 0.0)
    log_steps(tmp_path, "tensorboard", range(4, 8), 100.0, resume_step=3)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(one.step, one.value) for one in events.Scalars("actor/loss")]
    assert points == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 104.0), (5, 105.0), (6, 106.0), (7, 107.0)]


def test_a_clock_that_goes_back_does_not_change_the_order_of_event_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_steps(tmp_path, "tensorboard", range(1, 4), 0.0)
    monkeypatch.setattr("time.time", lambda: 1_000_000_000.0)
    log_steps(tmp_path, "tensorboard", range(3, 5), 100.0, resume_step=2)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [one.value for one in events.Scalars("actor/loss")] == [1.0, 2.0, 103.0, 104.0]


def test_a_full_disk_switches_tensorboard_off_and_ends_a_run_only_by_its_own_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with TrackerGroup(["tensorboard", "jsonl"], setup(tmp_path)) as group:
        group.log(1, {"actor/loss": 1.0})
        event_file = next((tmp_path / "tensorboard").iterdir())
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (event_file.stat().st_size + 10, limits[1]))
            group.log(2, {"a": 1.0})  # fits into metrics.jsonl
            group.log(3, {"a": 1.0})
            (said,) = caplog.records
            assert said.message == (
                "the tracker 'tensorboard' failed and is switched off; the run goes on, and metrics.jsonl has its "
                "numbers: OSError: [Errno 27] File too large"
            )
            with pytest.raises(RunError, match=r"metrics of step 4 to .*: File too large; free space, then"):
                group.log(4, {"long name" * 100: 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    log_steps(tmp_path, "tensorboard", range(4, 5), 0.0, resume_step=3)


def test_a_tracker_of_ones_own_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []
    probe = Probe(seen, "mine", fails=False)
    monkeypatch.setattr(probe, "log", lambda step, metrics: {}["key"])
    monkeypatch.setitem(trackers, "mine", lambda setup: probe)
    with TrackerGroup(["mine", "jsonl"], setup(tmp_path)) as group:
        group.log(1, {"a": 1.0})
        group.log(2, {"a": 1.0})
    assert len(caplog.records) == 1
    assert "the tracker 'mine' failed and is switched off" in caplog.text
    assert (seen, len(read_metrics(tmp_path / "metrics.jsonl"))) == (["mine closed"], 2)


def test_missing_tensorboard_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(ValueError, match="needs the package tensorboard: pip install tensorboard, or take"):
        TrackerGroup(["tensorboard"], setup(tmp_path))


class Probe:
    def __init__(self, log: list[str], name: str, *, fails: bool) -> None:
        self._log, self._name, self._fails = log, name, fails

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log.append(f"{self._name} {step}")

    def close(self) -> None:
        self._log.append(f"{self._name} closed")
        if self._fails:
            raise OSError("disk")


def test_every_tracker_is_closed_also_when_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []
    monkeypatch.setitem(trackers, "good", lambda setup: Probe(log, "good", fails=False))
    monkeypatch.setitem(trackers, "bad", lambda setup: Probe(log, "bad", fails=True))
    group = TrackerGroup(["good", "bad"], setup(tmp_path))
    group.log(7, {})
    group.close()
    assert "the tracker 'bad' failed and is switched off" in caplog.text
    group.close()
    assert log == ["good 7", "bad 7", "bad closed", "good closed"]

    def broken(setup: TrackerSetup) -> Probe:
        raise ValueError("no server")

    def ending(setup: TrackerSetup) -> Probe:
        raise RunError("the record cannot be written")

    log.clear()
    caplog.clear()
    monkeypatch.setitem(trackers, "broken", broken)
    with TrackerGroup(["good", "broken"], setup(tmp_path)) as group:
        group.log(8, {})
    (record,) = caplog.records
    sentence = record.getMessage()
    assert sentence.startswith("the tracker 'broken' failed and is switched off")
    assert sentence.endswith("ValueError: no server")
    assert log == ["good 8", "good closed"]

    log.clear()
    monkeypatch.setitem(trackers, "ending", ending)
    with pytest.raises(RunError, match="the record cannot be written"):
        TrackerGroup(["good", "ending"], setup(tmp_path))
    assert log == ["good closed"]


@pytest.mark.parametrize("method", ["__init__", "log", "note", "close"])
def test_a_tracker_of_ones_own_that_exits_does_not_end_the_run(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def leave(*arguments: object) -> None:
        raise SystemExit("no account")

    class Exiting(Probe):
        def __init__(self, setup: TrackerSetup) -> None:
            super().__init__([], "exiting", fails=False)

    monkeypatch.setattr(Exiting, method, leave, raising=False)
    monkeypatch.setitem(trackers, "exiting", Exiting)
    with TrackerGroup(["exiting", "jsonl"], setup(tmp_path)) as group:
        group.log(1, {"a": 1.0})
        group.note("half")
        group.log(2, {"a": 1.0})
    (record,) = caplog.records
    assert record.getMessage().endswith("SystemExit: no account")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_unknown_tracker_lists_the_known_ones_before_any_starts(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match="unknown tracker 'wandbb'; known: clearml, comet, console, jsonl, .*tensorboard, .*trackio, wandb",
    ):
        TrackerGroup(["jsonl", "wandbb"], setup(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "console", "jsonl"])
def test_a_tracker_under_the_name_of_a_built_in_one_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(trackers, name, Probe)
        with pytest.raises(
            ValueError, match=rf"tracker '{name}' is built in, and .*\.Probe is registered under the"
        ):
            check_trackers(["jsonl", name])
    entry = EntryPoint(name, "its_trackers", "strop.trackers")
    monkeypatch.setattr(
        registry, "packaged", lambda group: {name: (entry,)} if group == "strop.trackers" else {}
    )
    with pytest.raises(
        ValueError,
        match=rf"tracker '{name}' is built in, and an entry point \(strop.trackers\) of the installed package its_tr",
    ):
        check_trackers(["jsonl", name])


def test_progress_of_a_piped_process_goes_to_stderr_and_leaves_stdout_alone() -> None:
    code = (
        "from pathlib import Path; from strop.observability.trackers.group import TrackerGroup\n"
        "from strop.observability.trackers.setup import TrackerSetup\n"
        "with TrackerGroup(['console'], TrackerSetup(folder=Path('.'), total_steps=1)) as group:\n"
        "    group.log(1, {'critic/rewards/mean': 1.0})\n"
        "print('{}')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert result.stdout == "{}\n"
    assert result.stderr == "train step 1/1  reward 1.000  eta 0:00:00\n"
