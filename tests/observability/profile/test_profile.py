"""Where the time of a run went, on event logs and timelines that are worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strop.cli.main import main
from strop.config import ConfigError, load_config, to_dict
from strop.observability.profile.avoidable import Avoidable, avoidable_parts, largest_avoidable
from strop.observability.profile.phases import Phases, phases_of
from strop.observability.profile.report import profile_of
from strop.observability.profile.steps import ProfiledStep, imbalance, summed_up
from strop.observability.viewer.records import RunRecords
from strop.observability.viewer.summary import flattened
from strop.run.profile.chrome_trace import StepTimeline, trace_of
from strop.run.profile.parts import TIMELINE, step_folder
from strop.trainer.config import Config
from strop.utils.timeline import Category, Fact, TimelineSpan, Track

T0 = 1_700_000_000.0
PHASES = {"gen": 6.0, "update_actor": 3.0, "testing": 0.5}


def made_run(
    folder: Path, events: Sequence[tuple[str, int, float, Mapping[str, Any]]], settings: Mapping[str, Any]
) -> RunRecords:
    """Records of a run with these events: kind, step, seconds since T0, fields."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"config": settings, "command": ["strop", "train"]}))
    lines = [
        json.dumps({"kind": kind, "step": step, "time": T0 + at, **fields})
        for kind, step, at, fields in events
    ]
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    metrics = [{"step": 1, "timing_s/save_checkpoint": 0.75}, {"step": 2, "timing_s/save_checkpoint": 0.25}]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in metrics))
    records = RunRecords(folder)
    records.read_on()
    return records


def step(number: int, at: float, **waits: float) -> tuple[str, int, float, Mapping[str, Any]]:
    """A step of 10 s that ends then."""
    return "step", number, at, {"seconds": 10.0, "phases": PHASES, "waits": waits}


TWO_STEPS = [
    ("created", 0, 0.0, {}),
    ("roles_started", 0, 5.0, {}),
    ("preflight", 0, 9.0, {}),
    ("validation", 0, 12.0, {}),
    step(1, 23.0, tail=2.5, rewards=0.25),  # began at 13
    ("validation", 2, 35.5, {}),  # a phase of the second step
    step(2, 36.0, tail=1.5),  # began at 26: 3 s after the first step
    ("finished", 2, 38.0, {"seconds": 38.0}),
]
SETTINGS = {
    "rollout": {"max_staleness": 0.0}, "reward": {"num_workers": 2}, "data": {"prompts_per_step": 8},
    "eval": {"every": 20}, "run": {"save_every": 10}, "algorithm": {"adv_estimator": "grpo"},
}  # fmt: skip


def test_phases_add_up_to_the_time_of_the_run(tmp_path: Path) -> None:
    events = [*TWO_STEPS[:-1], ("profiled", 2, 37.5, {"seconds": 1.5}), TWO_STEPS[-1]]
    phases = phases_of(made_run(tmp_path / "run", events, SETTINGS))
    assert phases.seconds == {
        "gen": 12.0,
        "start": 6.0,  # 5 to the roles, 1 from the validation to the first step
        "update_actor": 6.0,
        "preflight": 4.0,
        "first_validation": 3.0,
        "other": 3.5,
        "profile": 1.5,
        "save_checkpoint": 1.0,
        "testing": 1.0,
    }
    assert (phases.total, phases.steps, phases.steps_s) == (38.0, (1, 2), 20.0)
    assert phases.waits == {"tail": 4.0, "rewards": 0.25}


def test_a_continued_run_has_two_starts(tmp_path: Path) -> None:
    events = [
        ("created", 0, 0.0, {}), ("roles_started", 0, 2.0, {}), step(1, 12.0), step(2, 22.0),
        ("resumed", 1, 1000.0, {}), ("roles_started", 1, 1004.0, {}), step(2, 1014.0),
        ("finished", 2, 1014.0, {"seconds": 26.0}),
    ]  # fmt: skip
    phases = phases_of(made_run(tmp_path / "run", events, SETTINGS))
    assert phases.seconds["start"] == 6.0, "2 s, and 4 s after it was continued"
    assert phases.seconds["gen"] == 12.0, "the second step counts once: its first try was taken back"
    assert phases.total == 12.0 + 14.0


def test_a_validation_in_the_first_step_is_a_phase_of_it_alone(tmp_path: Path) -> None:
    events = [
        ("created", 0, 0.0, {}), ("roles_started", 0, 2.0, {}), ("validation", 0, 5.0, {}),
        ("validation", 1, 14.5, {}), step(1, 15.0), ("finished", 1, 15.0, {}),
    ]  # fmt: skip
    phases = phases_of(made_run(tmp_path / "run", events, SETTINGS))
    assert phases.of("start", "first_validation", "testing") == 2.0 + 3.0 + 0.5
    assert phases.seconds["first_validation"] == 3.0
    again = [("created", 0, 0.0, {}), ("resumed", 4, 100.0, {}), ("roles_started", 4, 102.0, {})]
    continued = phases_of(
        made_run(tmp_path / "again", [*again, ("validation", 5, 111.5, {}), step(5, 112.0)], SETTINGS)
    )
    assert (continued.of("first_validation"), continued.of("start")) == (0.0, 2.0)


def test_validation_of_fine_tuning_follows_its_step(tmp_path: Path) -> None:
    events = [
        ("created", 0, 0.0, {}),
        ("roles_started", 0, 2.0, {}),
        step(1, 12.0),
        ("validation", 1, 15.0, {}),
    ]
    assert phases_of(made_run(tmp_path / "run", events, SETTINGS)).seconds["testing"] == 3.5


def test_the_largest_part_and_its_setting(tmp_path: Path) -> None:
    profile = profile_of(made_run(tmp_path / "run", TWO_STEPS, SETTINGS))
    assert profile.avoidable is not None
    tail = ("tail of generation", 4.0, "rollout.max_staleness", "rollout.max_staleness=1")
    part = profile.avoidable
    assert (part.name, part.seconds, part.key, part.setting) == tail
    as_json = profile.as_json()
    assert as_json["phases"][0] == {"name": "gen", "seconds": 12.0, "share": 12 / 38}
    assert as_json["avoidable"]["share"] == 4 / 38


def parts(
    phases: Phases, settings: Mapping[str, Any], profiled: Sequence[ProfiledStep] = ()
) -> dict[str, Avoidable]:
    return {part.name: part for part in avoidable_parts(phases, settings, profiled) if part.seconds > 0}


def phases(waits: Mapping[str, float] | None = None, **seconds: float) -> Phases:
    return Phases(seconds=seconds, steps=(1, 2), steps_s=sum(seconds.values()), waits=waits or {})


def test_generation_and_training_in_turns_could_overlap() -> None:
    settings = {"resources.apart.rollout": 2, "rollout.max_staleness": 0.0}
    part = parts(phases(gen=12.0, update_actor=5.0, ref=2.0), settings)["generation and training in turns"]
    assert (part.seconds, part.setting) == (7.0, "rollout.max_staleness=1")


def test_a_trainer_that_waits_gets_more_workers() -> None:
    # A step takes 12 + 4 = 16 s, as generation does. With three processes in place of two it takes 16 * 2/3 = 10.67 s.
    settings = {"resources.apart.rollout": 2, "rollout.max_staleness": 1.0}
    part = parts(phases(gen=12.0, update_actor=4.0), settings)["wait for samples"]
    assert part.seconds == pytest.approx(16 / 3)
    assert part.setting == "resources.apart.rollout=3"
    only_training = parts(phases(gen=1.0, update_actor=15.0), settings)["wait for samples"]
    assert only_training.seconds == 1.0, "no more than it waited"


def test_rewards_of_processes_and_of_services() -> None:
    waited = phases({"rewards": 8.0}, gen=20.0)
    own = parts(waited, {"reward.num_workers": 3})["wait for rewards"]
    assert (own.seconds, own.setting) == (4.0, "reward.num_workers=6")
    for address in ("reward.judge.base_url", "reward.server.url"):
        asked = parts(waited, {address: "http://judge", "reward.num_workers": 3})["wait for rewards"]
        assert (asked.seconds, asked.setting) == (8.0, "rollout.max_staleness=1")


def test_an_estimator_that_needs_the_same_policy_does_not_run_ahead() -> None:
    waited = phases({"tail": 8.0, "rewards": 2.0}, gen=20.0)
    assert parts(waited, {"algorithm.adv_estimator": "remax", "reward.num_workers": 2}).keys() == {
        "wait for rewards"
    }


@pytest.mark.parametrize(
    ("overrides", "goes"),
    [
        ([], True),
        (["algorithm.policy_loss=cispo"], True),
        (["algorithm.policy_loss=gspo"], False),
        (["algorithm.policy_loss=gspo", "algorithm.old_log_probs=rollout"], True),
        (["algorithm.policy_loss=reinforce"], False),
        (["algorithm.policy_loss=reinforce", "algorithm.old_log_probs=rollout"], False),
        (["algorithm.policy_loss=reinforce", "algorithm.correction.weights=token"], True),
        (["algorithm.policy_loss=gspo", "algorithm.correction.reject={token_k1: 2.0}"], True),
        (["algorithm.old_log_probs=recompute"], False),
        (["rollout.router_replay=true"], False),
        (["trainer.skip_rollout=recorded"], False),
        (["algorithm.adv_estimator=remax"], False),
    ],
)
def test_generation_ahead_is_named_where_the_run_could_have_it(overrides: list[str], goes: bool) -> None:
    settings = flattened(to_dict(load_config(Config, overrides=overrides)))
    with nullcontext() if goes else pytest.raises(ConfigError, match="max_staleness"):
        load_config(Config, overrides=[*overrides, "rollout.max_staleness=1"])
    assert ("tail of generation" in parts(phases({"tail": 8.0}, gen=20.0), settings)) == goes


def test_half_as_many_syncs() -> None:
    part = parts(phases(update_weights=9.0), {"data.prompts_per_step": 20})["weight sync"]
    assert (part.seconds, part.setting) == (4.5, "data.prompts_per_step=40")


@pytest.mark.parametrize(("phase", "key", "name"), [
    ("testing", "eval.every", "validation"), ("save_checkpoint", "run.save_every", "checkpoints"),
])  # fmt: skip
def test_work_of_every_few_steps_is_done_more_rarely(phase: str, key: str, name: str) -> None:
    done = replace(phases(**{phase: 9.0}), steps=tuple(range(1, 6)))
    # Five steps, every second one: after 2, 4 and the last one, 5. Every fourth one: after 4 and 5.
    part = parts(done, {key: 2})[name]
    assert (part.seconds, part.setting) == (pytest.approx(3.0), f"{key}=4")
    assert not parts(done, {key: 0}), "it is done at the end alone"
    assert not parts(done, {key: 5})


def test_checkpoints_of_the_background_are_not_named_where_they_are_on() -> None:
    done = replace(phases(save_checkpoint=9.0), steps=tuple(range(1, 6)))
    note = "run.async_save=true writes them in the background"
    assert note in parts(done, {"run.save_every": 2, "run.async_save": False})["checkpoints"].reason
    assert note not in parts(done, {"run.save_every": 2, "run.async_save": True})["checkpoints"].reason


def span(
    name: str, start_s: float, end_s: float, rank: int = 0, category: Category = "call", **facts: Fact
) -> TimelineSpan:
    return TimelineSpan(
        name=name, category=category, track=Track("actor", rank), start_s=start_s, end_s=end_s, facts=facts
    )


TWO_RANKS = (
    # An update of 8 s: rank 0 has 300 + 100 tokens, rank 1 has 200: of the most, a mean rank has 3/4.
    span("update_policy", 1, 9), span("forward and backward", 1, 4, 0, "compute", tokens=300),
    span("forward and backward", 4, 5, 0, "compute", tokens=100),
    span("update_policy", 1, 9, 1), span("forward and backward", 1, 3, 1, "compute", tokens=200),
    span("waits for other ranks", 3, 8, 1, "wait"), span("waits for controller", 9, 10, 1, "wait"),
    span("offload", 9, 9.5),
)  # fmt: skip


def test_ranks_with_fewer_tokens_wait() -> None:
    assert imbalance(TWO_RANKS) == pytest.approx(2.0)
    assert imbalance([one for one in TWO_RANKS if one.track.rank == 0]) == 0.0, "nobody to wait for"


def test_work_and_waits_of_each_rank() -> None:
    timeline = StepTimeline(step=2, seconds=10.0, spans=TWO_RANKS)
    profiled = summed_up(timeline, Path("timeline.json"))
    first, second = profiled.ranks
    assert (first.role, first.rank, first.busy_s, first.waits_s) == ("actor", 0, 8.5, {})
    assert (second.busy_s, second.waits_s) == (
        3.0,
        {"waits for other ranks": 5.0, "waits for controller": 1.0},
    )
    assert (profiled.imbalance_s, profiled.offload_s) == (pytest.approx(2.0), 0.5)


def test_profiled_steps_stand_for_all_steps() -> None:
    timeline = StepTimeline(step=2, seconds=10.0, spans=TWO_RANKS)
    profiled = [summed_up(timeline, Path("timeline.json"))]
    settings = {"data.prompts_per_step": 8, "resources.offload_idle": True}
    found = parts(phases(update_actor=100.0), settings, profiled)
    assert found["imbalance of ranks"].seconds == pytest.approx(0.2 * 100 / 2)
    assert found["imbalance of ranks"].setting == "data.prompts_per_step=16"
    assert found["offloading"].seconds == pytest.approx(0.05 * 100)
    assert largest_avoidable(phases(update_actor=100.0), settings, profiled) == found["imbalance of ranks"]


def test_a_run_without_a_step_and_a_folder_without_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_run(tmp_path / "run", [("created", 0, 0.0, {})], SETTINGS)
    assert main(["profile", str(tmp_path / "run")]) == 2
    assert "has done no step yet" in capsys.readouterr().err
    assert main(["profile", str(tmp_path)]) == 2
    assert "is no run folder (it has no run.json); give the folder that --out" in capsys.readouterr().err
    assert main(["profile", str(tmp_path / "absent")]) == 2
    assert "absent does not exist; give the folder that --out named" in capsys.readouterr().err


def test_a_timeline_that_cannot_be_read_is_left_out_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    made_run(run, TWO_STEPS, SETTINGS)
    for number, text in (
        (1, json.dumps(trace_of(StepTimeline(step=1, seconds=10.0, spans=TWO_RANKS)))),
        (2, '{"traceEvents": ['),  # the disk was full
    ):
        step_folder(run, number).mkdir(parents=True)
        (step_folder(run, number) / TIMELINE).write_text(text)
    assert main(["profile", str(run), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in answer["profiled"]] == [1]
    (sentence,) = answer["unreadable"]
    assert sentence.startswith("step 2 was profiled and is left out: ")
    assert main(["profile", str(run)]) == 0
    out = capsys.readouterr().out
    assert "step 1, profiled" in out
    assert "step 2 was profiled and is left out: " in out


def test_the_command_loads_no_torch(tmp_path: Path) -> None:
    made_run(tmp_path / "run", TWO_STEPS, SETTINGS)
    code = (
        "import sys; from strop.cli.main import main; import strop.observability.viewer.page.answers\n"
        f"code = main(['profile', {str(tmp_path / 'run')!r}, '--json'])\n"
        "print(code, sorted({'torch', 'transformers', 'tensordict', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "0 []"


def test_an_event_log_of_another_form_is_no_error(tmp_path: Path) -> None:
    events = [
        ("created", 0, 0.0, {}),
        ("step", 1, 10.0, {"seconds": "x", "phases": [], "waits": {"tail": "y"}}),
        ("step", 2, 12.0, {"seconds": 2.0, "phases": {"gen": -1.0}}),
    ]
    phases = phases_of(made_run(tmp_path / "run", events, {}))
    assert phases.steps == (1, 2)
    assert phases.total >= 12.0
