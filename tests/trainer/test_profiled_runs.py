"""Profiled steps of whole runs: timelines that fit together, on one process and on two, and results that stay."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Done, Project, train_in

from strop.cli.main import main
from strop.controller import InlineRuntime, Worker, role
from strop.observability.profile.report import profile_of
from strop.observability.trackers.setup import read_metrics
from strop.observability.viewer.records import RunRecords
from strop.rewards import RewardError
from strop.run.profile.chrome_trace import StepTimeline, read_trace
from strop.run.profile.parts import PROFILE, TIMELINE, profiled_steps, step_folder
from strop.run.profile.waits import merged, overlap
from strop.trainer.profiling import StepProfiler
from strop.trainer.sections import TrainerConfig
from strop.trainer.sft.trainer import fine_tune
from strop.trainer.start import start_run
from strop.utils import process_profiler, timeline
from strop.utils.timeline import CONTROLLER, TimelineSpan, Track

KL = ["algorithm.use_kl_loss=true", "algorithm.kl_loss_type=abs", "algorithm.kl_loss_coef=0.01"]
"""Settings of the run `on_policy`."""
RAY = ["resources.runtime=ray", "resources.cpus_per_rank=0.25"]
CLOCK_S = 0.05
"""More than clocks of processes of one machine can be apart."""


@pytest.fixture(scope="module")
def profiled(project: Project) -> Done:
    """The run `on_policy` with its second step profiled."""
    return train_in(project.folder / "profiled", project.config(*KL, "trainer.profile_steps=[2]"))


def timeline_of(done: Done, step: int) -> StepTimeline:
    return read_trace(step_folder(done.folder, step) / TIMELINE)


def events_of(done: Done, step: int) -> list[dict[str, Any]]:
    """The events of the file itself, as Perfetto reads them."""
    document = json.loads((step_folder(done.folder, step) / TIMELINE).read_text())
    return list(document["traceEvents"])


def check_nesting(events: list[dict[str, Any]]) -> None:
    """In a thread, events lie in one another or one after the other."""
    by_thread: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            by_thread[event["pid"], event["tid"]].append(event)
    for thread in by_thread.values():
        ends: list[float] = []
        for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= event["ts"] + 1e-3:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-3, event
            ends.append(event["ts"] + event["dur"])


def check_sums(recorded: StepTimeline, step_event: dict[str, Any]) -> None:
    """Phases have the seconds of the event log; on each rank calls and waits fill the step."""
    phases: dict[str, float] = defaultdict(float)
    for span in recorded.spans:
        if span.category == "phase":
            phases[span.name] += span.seconds
    for name, seconds in step_event["phases"].items():
        assert phases[name] == pytest.approx(seconds, abs=0.01), name
    for track in {span.track for span in recorded.spans if span.category == "call"}:
        covered = merged(
            (span.start_s, span.end_s)
            for span in recorded.spans
            if span.track == track and span.category in ("call", "wait", "answer")
        )
        assert overlap(covered, 0.0, recorded.seconds) == pytest.approx(recorded.seconds, rel=0.1)


def of(recorded: StepTimeline, category: str, track: Track | None = None) -> list[TimelineSpan]:
    spans = [span for span in recorded.spans if span.category == category]
    return [span for span in spans if track is None or span.track == track]


def step_event(done: Done, step: int) -> dict[str, Any]:
    lines = (done.folder / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.startswith('{"kind":"step"')]
    return next(event for event in events if event["step"] == step)


def test_profiling_changes_no_result(on_policy: Done, profiled: Done) -> None:
    assert [link.chain for link in profiled.chain] == [link.chain for link in on_policy.chain]
    assert not (on_policy.folder / PROFILE).exists()


def test_timeline_of_one_process(profiled: Done) -> None:
    assert profiled_steps(profiled.folder) == [2]
    recorded = timeline_of(profiled, 2)
    check_nesting(events_of(profiled, 2))
    check_sums(recorded, step_event(profiled, 2))
    (whole,) = of(recorded, "step")
    assert (whole.name, whole.track) == ("step 2", CONTROLLER)
    assert whole.seconds == pytest.approx(recorded.seconds, abs=0.01)
    calls = [span.name for span in of(recorded, "call", Track("actor", 0))]
    assert "update_policy" in calls
    assert "profile_clock" not in calls
    assert of(recorded, "call", Track("rollout", 0))[0].name == "run_episodes"
    (update,) = [span for span in of(recorded, "call") if span.name == "update_policy"]
    parts = [
        span for span in of(recorded, "compute", Track("actor", 0))
        if update.start_s <= span.start_s <= span.end_s <= update.end_s
    ]  # fmt: skip
    assert [span.name for span in parts if span.name != "forward"] == [
        "forward and backward",
        "optimizer step",
    ]


def test_each_sample_has_its_begin_end_and_reward(profiled: Done) -> None:
    recorded = timeline_of(profiled, 2)
    (call,) = [span for span in of(recorded, "call") if span.name == "run_episodes"]
    reports = profiled.records[1].reports
    episodes = of(recorded, "episode")
    assert {span.episode for span in episodes} == {report.id for report in reports}
    assert all(call.start_s - 0.01 <= span.start_s < span.end_s <= call.end_s + 0.01 for span in episodes)
    tokens = {report.id: report.num_response_tokens for report in reports}
    for category in ("answer", "reward"):
        assert {span.episode for span in of(recorded, category)} == tokens.keys()
    assert {span.episode: span.facts["tokens"] for span in of(recorded, "answer")} == tokens
    scores = {report.id: report.score for report in reports}
    assert {span.episode: span.facts["score"] for span in of(recorded, "reward")} == scores


def test_trace_of_torch_has_the_operations_and_the_spans(profiled: Done) -> None:
    (file,) = step_folder(profiled.folder, 2).glob("trace-*.json.gz")
    assert file.name == "trace-actor-0.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert {"aten::mm", "update_policy", "optimizer step"} <= names


def test_the_waits_of_generation_are_in_the_event_log(profiled: Done) -> None:
    for step in (1, 2, 3):
        event = step_event(profiled, step)
        assert event["waits"].keys() == {"tail", "rewards"}
        assert 0 <= event["waits"]["tail"] + event["waits"]["rewards"] <= event["phases"]["gen"]


def test_the_command_accounts_for_all_of_the_time(profiled: Done, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(profiled.folder), "--json"]) == 0
    profile = json.loads(capsys.readouterr().out)
    assert {"phases", "avoidable"} <= profile.keys()
    assert sum(phase["share"] for phase in profile["phases"]) == pytest.approx(1)
    lines = (profiled.folder / "events.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0])["time"], json.loads(lines[-1])["time"]
    assert profile["seconds"] == pytest.approx(last - first, abs=0.01)
    assert {"start", "gen", "update_actor", "first_validation", "profile"} <= {
        p["name"] for p in profile["phases"]
    }
    assert [step["step"] for step in profile["profiled"]] == [2]
    assert main(["profile", str(profiled.folder)]) == 0
    out = capsys.readouterr().out
    assert f"{profile['avoidable']['setting']}\n" in out
    assert "step 2, profiled" in out


def test_fine_tuning_is_profiled_as_well(project: Project, tmp_path: Path) -> None:
    config = project.config(
        "trainer.profile_steps=[2,3,99]",
        "sft.max_steps=3",
        "eval.every=1",
        f"sft.data.val_files=['{project.task.sft}']",
    )
    said: list[str] = []
    with start_run(tmp_path / "run", config, command=["strop", "sft"]).run as run:
        fine_tune(config, run, say=said.append)
    assert profiled_steps(tmp_path / "run") == [2, 3]
    assert "WARNING: trainer.profile_steps names 99, but the last step is 3" in said
    recorded = read_trace(step_folder(tmp_path / "run", 2) / TIMELINE)
    assert "update" in {span.name for span in of(recorded, "call", Track("actor", 0))}
    records = RunRecords(tmp_path / "run")
    records.read_on()
    profile = profile_of(records)
    assert {"start", "update", "testing", "save_checkpoint"} <= profile.phases.seconds.keys()
    (saved,) = of(read_trace(step_folder(tmp_path / "run", 3) / TIMELINE), "phase")[-1:]
    assert saved.name == "save_checkpoint"
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["timing_s/save_checkpoint"] == pytest.approx(saved.seconds, abs=0.01)
    assert profile.as_json()["seconds"] == pytest.approx(sum(profile.phases.seconds.values()))


def test_an_error_in_a_profiled_step_ends_the_profilers(project: Project, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(*args, **kwargs):\n    raise ValueError('no')\n")
    settings = [
        f"reward.path={tmp_path / 'reward.py'}",
        "eval.before_train=false",
        "trainer.profile_steps=[1]",
    ]
    with pytest.raises(RewardError):
        train_in(tmp_path / "run", project.config(*settings))
    assert not timeline.is_recorded()
    assert timeline.start(), "the next run records its own"
    timeline.stop()


class Unprofiled(Worker):
    """Its profilers cannot be started, as those of a process that somebody else profiles."""

    def start_profile(self, *, memory: bool) -> str:
        super().start_profile(memory=memory)
        raise RuntimeError("profiled already")


def test_profilers_that_cannot_be_started_end(project: Project, tmp_path: Path) -> None:
    groups = list(InlineRuntime().groups({"actor": role(Unprofiled)}).values())
    with start_run(tmp_path / "run", project.config(), command=["strop", "train"]).run as run:
        profiler = StepProfiler(TrainerConfig(profile_steps=(1,)), run, say=print)
    with pytest.raises(RuntimeError, match="profiled already"), profiler.step(1, groups):
        pytest.fail("the step is not begun")
    assert not timeline.is_recorded()
    assert process_profiler.start("actor-0", memory=False), "nothing runs any more"
    process_profiler.drop()


def test_memory_is_recorded_on_cuda_alone_and_with_steps(project: Project, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="profile_steps names no step"):
        project.config("trainer.profile_memory=true")
    config = project.config(
        "trainer.profile_memory=true", "trainer.profile_steps=[1]", "resources.device=cpu"
    )
    with pytest.raises(ValueError, match="records CUDA's allocations, but the run computes on cpu"):
        start_run(tmp_path / "run", config, command=["strop", "train"])
    assert not (tmp_path / "run").exists()


@pytest.mark.dist
def test_two_processes_and_generation_apart(project: Project, tmp_path: Path) -> None:
    settings = [*KL, *RAY, "resources.ranks=2", "resources.apart.rollout=1", "trainer.profile_steps=[1,2]"]
    done = train_in(tmp_path / "run", project.config(*settings))
    assert profiled_steps(done.folder) == [1, 2]
    for step in (1, 2):
        recorded, event = timeline_of(done, step), step_event(done, step)
        check_nesting(events_of(done, step))
        check_sums(recorded, event)
        tracks = {span.track for span in of(recorded, "call")}
        assert tracks == {Track(role, rank) for role in ("actor", "reference") for rank in (0, 1)} | {
            Track("rollout", 0)
        }
        assert {span.track for span in of(recorded, "wait")} == tracks
        assert recorded.clock_error_s < CLOCK_S
        check_order(recorded)
        assert len(of(recorded, "episode", Track("rollout", 0))) == 16
        traces = {path.name for path in step_folder(done.folder, step).glob("trace-*")}
        assert traces == {f"trace-{name}.json.gz" for name in ("actor-0", "actor-1", "rollout-0")}
        assert not list(step_folder(done.folder, step).glob("spans-*"))


def check_order(recorded: StepTimeline) -> None:
    """Calls lie in the phases of the controller that waits for them: the clocks agree."""
    phase_of = {"run_episodes": "gen", "update_policy": "update_actor", "compute_ref_log_prob": "ref"}
    for method, phase in phase_of.items():
        (during,) = [span for span in of(recorded, "phase") if span.name == phase]
        calls = [span for span in of(recorded, "call") if span.name == method]
        assert calls
        for call in calls:
            assert during.start_s - CLOCK_S <= call.start_s <= call.end_s <= during.end_s + CLOCK_S
