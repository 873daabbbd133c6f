"""Timelines of steps: waits, lanes, clocks, and the file, on spans that are worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strop.run import RunError
from strop.run.profile.chrome_trace import StepTimeline, lanes, read_trace, trace_of
from strop.run.profile.parts import Clock, clock_of, join_parts, missing_parts, write_part
from strop.run.profile.waits import waits_between
from strop.utils.timeline import CONTROLLER, Category, TimelineSpan, Track

ACTOR, PEER, ROLLOUT = Track("actor", 0), Track("actor", 1), Track("rollout", 0)


def span(
    name: str,
    start_s: float,
    end_s: float,
    track: Track = ACTOR,
    category: Category = "call",
    episode: str = "",
) -> TimelineSpan:
    return TimelineSpan(
        name=name, category=category, track=track, start_s=start_s, end_s=end_s, episode=episode
    )


def test_gaps_are_waits_for_whoever_works() -> None:
    # rollout 0-6, then the actor's ranks: rank 0 from 6 to 9, rank 1 from 6 to 7; the controller alone until 10.
    spans = [span("run_episodes", 0, 6, ROLLOUT), span("update", 6, 9), span("update", 6, 7, PEER)]
    waits = waits_between(spans, end_s=10.0)
    assert [(wait.track, wait.name, wait.start_s, wait.end_s) for wait in waits] == [
        (ACTOR, "waits for rollout", 0.0, 6),
        (ACTOR, "waits for controller", 9, 10.0),
        (PEER, "waits for rollout", 0.0, 6),
        (PEER, "waits for rank 0", 7, 10.0),
        (ROLLOUT, "waits for actor", 6, 10.0),
    ]


def test_of_two_that_work_as_long_it_waits_for_its_own_role() -> None:
    spans = [span("run", 0, 5, ROLLOUT), span("update", 0, 5, PEER), span("update", 5, 9)]
    (wait,) = [wait for wait in waits_between(spans, end_s=9.0) if wait.track == ACTOR]
    assert (wait.name, wait.start_s, wait.end_s) == ("waits for rank 1", 0.0, 5)


def test_an_engine_that_answers_between_calls_does_not_wait() -> None:
    spans = [
        span("start_groups", 0, 1, ROLLOUT),
        span("answer 0", 1, 4, ROLLOUT, "answer", "a/0"),
        span("update", 2, 9),
    ]
    (wait,) = [wait for wait in waits_between(spans, end_s=9.0) if wait.track == ROLLOUT]
    assert (wait.start_s, wait.end_s) == (4, 9.0)


def test_samples_share_lanes_and_hold_their_parts() -> None:
    spans = [
        span("a/0", 0, 4, ROLLOUT, "episode", "a/0"),
        span("answer 0", 0, 3, ROLLOUT, "answer", "a/0"),
        span("reward", 3, 4.5, ROLLOUT, "reward", "a/0"),  # by another clock; it ends with the sample
        span("b/0", 1, 2, ROLLOUT, "episode", "b/0"),
        span("c/0", 2, 5, ROLLOUT, "episode", "c/0"),
        span("answer 0", 2, 4, ROLLOUT, "answer", "c/0"),
        span("answer 1", 3, 5, ROLLOUT, "answer", "c/0"),  # while the other one was given
    ]
    placed = {(lane, part.name, part.episode, part.end_s) for lane, part in lanes(spans)}
    assert placed == {
        (0, "a/0", "a/0", 4), (0, "answer 0", "a/0", 3), (0, "reward", "a/0", 4),
        (1, "b/0", "b/0", 2),
        (1, "c/0", "c/0", 5), (1, "answer 0", "c/0", 4),
        (2, "answer 1", "c/0", 5),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("told_s", "expected"),
    [
        (10.3, Clock(ahead_s=0.0, error_s=0.5)),  # between question and answer: it may be the same clock
        (110.25, Clock(ahead_s=100.0, error_s=0.25)),
        (5.25, Clock(ahead_s=-5.0, error_s=0.25)),
    ],
)
def test_clock_of_a_process(told_s: float, expected: Clock) -> None:
    assert clock_of(10.0, told_s, 10.5) == expected


def test_parts_are_joined_on_the_controllers_clock(tmp_path: Path) -> None:
    # The step is 1000 to 1010. The actor's clock is 50 s ahead, and its profiler began before the step.
    write_part(tmp_path, "controller", [span("update_actor", 1002, 1008, CONTROLLER, "phase")])
    write_part(tmp_path, "actor-0", [span("early", 1040, 1049.5), span("update_policy", 1053, 1057)])
    clocks = {"actor-0": Clock(ahead_s=50.0, error_s=0.25), "actor-1": Clock(ahead_s=0.0, error_s=0.125)}
    joined = join_parts(tmp_path, step=3, start_s=1000.0, end_s=1010.0, clocks=clocks)
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json"]
    timeline = read_trace(tmp_path / "timeline.json")
    assert (timeline.step, timeline.seconds, timeline.clock_error_s) == (3, 10.0, 0.25)
    assert {(part.name, part.track, part.start_s, part.end_s) for part in timeline.spans} == {
        ("update_actor", CONTROLLER, 2, 8),
        ("update_policy", ACTOR, 3, 7),
        ("waits for controller", ACTOR, 0, 3),
        ("waits for controller", ACTOR, 7, 10),
    }
    assert len(joined.spans) == len(timeline.spans)


def test_parts_of_other_folders_are_missed(tmp_path: Path) -> None:
    write_part(tmp_path, "actor-0", [])
    assert missing_parts(tmp_path, {"actor-1", "actor-0", "rollout-0"}) == ["actor-1", "rollout-0"]


def test_what_is_written_is_what_perfetto_reads() -> None:
    spans = (
        span("step 3", 0, 2, CONTROLLER, "step"),
        span("update_policy", 0.5, 1.5, PEER),
        span("a/0", 0, 1, ROLLOUT, "episode", "a/0"),
    )
    document = trace_of(StepTimeline(step=3, seconds=2.0, spans=spans))
    names = {(e["pid"], e["args"]["name"]) for e in document["traceEvents"] if e["name"] == "process_name"}
    assert names == {(1, "controller"), (2, "actor"), (3, "rollout 0: samples")}
    (update,) = [event for event in document["traceEvents"] if event["name"] == "update_policy"]
    assert update == {
        "ph": "X", "name": "update_policy", "cat": "call", "ts": 500_000.0, "dur": 1_000_000.0, "pid": 2, "tid": 2,
        "args": {},
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": [{"ph": "X"}], "otherData": {}}'])
def test_a_file_that_is_no_timeline_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(text)
    with pytest.raises(RunError, match="is no timeline of a step"):
        read_trace(path)


def test_an_unknown_category_is_refused(tmp_path: Path) -> None:
    document = trace_of(StepTimeline(step=3, seconds=2.0, spans=(span("a", 0, 1),)))
    document["traceEvents"][-1]["cat"] = "other"
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(document))
    with pytest.raises(RunError, match="unknown category 'other'"):
        read_trace(path)
