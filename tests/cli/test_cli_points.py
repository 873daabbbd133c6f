"""`strop eval` and `strop compare` of several models and checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from cli_calls import Project, cli

from strop.cli.eval_table import measured, show
from strop.evaluation.checkpoints import Point
from strop.evaluation.cost import TrainingCost
from strop.evaluation.evaluate import Evaluation
from strop.evaluation.models import ModelSource
from strop.observability.trackers.setup import read_metrics
from strop.rewards import Outcome
from strop.run import RunFolder
from strop.trainer.validation import summarize_validation
from strop.workers.reports import EpisodeReport

PASSES = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """About half of what a random model writes passes."""
    found = (solution_str or " ")[0]
    return {"score": float(ord(found) % 2), "acc": bool(ord(found) % 2), "pred": found}
'''


@pytest.mark.slow
def test_all_checkpoints_of_a_run_in_one_table_and_picture(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(PASSES)
    words = ["eval", f"{trained}@all", f"reward.path={tmp_path / 'reward.py'}", "eval.samples_per_prompt=4"]
    words += ["eval.temperature=1"]
    result = cli(*words, "--json", "--plot", tmp_path / "all.png")
    assert result.code == 0, result.err
    models = result.record["models"]
    assert [one["step"] for one in models] == [0, 1, 2]
    assert [one["model"] for one in models] == [f"{trained}@{step}" for step in (0, 1, 2)]
    assert models[0]["gain"] is None
    expected = models[2]["pass_rate"] - models[0]["pass_rate"]
    assert models[2]["gain"]["difference"] == pytest.approx(expected)
    assert models[2]["gain"]["low"] <= expected <= models[2]["gain"]["high"]
    tokens = [one["perf/total_num_tokens"] for one in read_metrics(trained / "metrics.jsonl") if one["step"]]
    assert models[2]["spent"]["tokens"] == sum(tokens)
    with RunFolder.open(trained, read_only=True) as run:
        seconds = math.fsum(event["seconds"] for event in run.events.read("step"))
    assert models[2]["spent"]["device_hours"] == pytest.approx(seconds / 3600)
    assert models[0]["spent"] == {"tokens": 0.0, "device_hours": 0.0}
    assert set(models[1]["pass_at"]) == set(models[1]["maj_at"]) == {"2", "4"}
    assert (tmp_path / "all.png").read_bytes()[:4] == b"\x89PNG"
    alone = cli("eval", trained, *words[2:], "--json").record
    assert alone["pass_rate"] == models[2]["pass_rate"], "the same answers as alone"
    lines = cli(*words).out.splitlines()
    assert lines[0].split()[:3] == ["model", "pass", "rate"]
    assert [line.split()[0] for line in lines[1:4]] == [one["model"] for one in models]
    assert "pass@4" in lines[0]


def test_steps_are_named_as_for_from(trained: Path, project: Project) -> None:
    record = cli("eval", f"{trained}@1", project.model, "data.max_val_prompts=2", "--json").record
    assert [(one["step"], one["model"]) for one in record["models"]] == [
        (1, f"{trained}@1"),
        (None, str(project.model)),
    ]
    compared = cli("compare", f"{trained}@1", f"{trained}@best", "data.max_val_prompts=2", "--json").record
    assert compared["models"][0]["model"] == f"{trained}@1"
    assert {"difference", "low", "high"} <= set(compared)
    assert "'last' is no step" in cli("eval", f"{trained}@last").sentence
    assert "no checkpoint of step 7" in cli("eval", f"{trained}@7").sentence
    assert "are for one model" in cli("eval", f"{trained}@all", "--step", "1").sentence
    assert "name them, or RUN@all" in cli("eval", trained, "--plot", "x.png").sentence


def evaluation(passed: list[bool]) -> Evaluation:
    reports = [
        EpisodeReport(
            uid=f"val-{row:06d}",
            sample_index=0,
            data_source="x",
            num_prompt_tokens=1,
            num_response_tokens=4,
            outcome=Outcome(kind="score", score=float(one)),
        )
        for row, one in enumerate(passed)
    ]
    return Evaluation(total=summarize_validation(reports), by_source={}, answers=(), seconds=0.0, usage={})


def test_cost_is_that_of_the_steps_between_and_only_of_a_gain_that_is_shown() -> None:
    """From 20 to 60 of 100 prompts: 40 points, for 8,000 tokens and 2 device-hours."""
    run, source = Path("runs/x"), ModelSource(folder=Path("m"), config=None)

    def point(step: int, tokens: float, hours: float | None) -> Point:
        spent = TrainingCost(tokens=tokens, device_hours=hours)
        return Point(name=f"x@{step}", source=source, run=run, step=step, spent=spent)

    low, high = evaluation([True] * 20 + [False] * 80), evaluation([True] * 60 + [False] * 40)
    almost = evaluation([True] * 21 + [False] * 79)
    found = measured(
        [(point(10, 1000, 1.0), low), (point(50, 9000, 3.0), high), (point(60, 9500, None), almost)]
    )
    assert found[0].per_point() == {}
    assert found[1].spent == TrainingCost(tokens=8000, device_hours=2.0)
    assert found[1].per_point() == {"tokens": pytest.approx(200), "device_hours": pytest.approx(0.05)}
    assert found[1].tokens_per_answer == 4
    assert found[2].per_point() == {}, "one more prompt is no gain that is shown"
    other = measured([(Point(name="m", source=source), low), (point(50, 9000, 3.0), high)])
    assert other[1].per_point()["tokens"] == pytest.approx(225), "another model: all that the run has spent"
    json.dumps([one.per_point() for one in found])


def test_models_without_pass_rates_are_shown_with_the_intervals_of_their_mean_rewards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rewards 1, 2 and 3: mean 2, standard error 1 / sqrt(3), and t = 4.302653: 2.484 to either side."""

    def rewarded(*scores: float) -> Evaluation:
        total = summarize_validation(
            [
                EpisodeReport(
                    uid=f"v{number}", sample_index=0, data_source="x", num_prompt_tokens=1,
                    num_sampled_tokens=4, num_response_tokens=4, outcome=Outcome(kind="score", score=score),
                )
                for number, score in enumerate(scores)
            ]
        )  # fmt: skip
        return Evaluation(total=total, by_source={"x": total}, answers=(), seconds=1.0, usage={})

    source = ModelSource(folder=Path("m"), config=None)
    some, equal = rewarded(1, 2, 3), rewarded(2, 2, 2)
    show(measured([(Point(name="a", source=source), some), (Point(name="b", source=source), equal)]))
    header, first, second = capsys.readouterr().out.splitlines()
    assert "mean reward  " in header
    assert "-0.4841 to 4.484" in first
    assert second.split()[:3] == ["b", "2", "-"], "equal rewards have no interval"
