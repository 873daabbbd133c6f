"""`strop runs` and `strop plot`."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.cli_calls import cli
from observability.viewer.made_runs import make_run

from strop.cli.commands.runs import _best, _rate
from strop.observability.viewer.curves import smoothed
from strop.observability.viewer.records import RunRecords
from strop.observability.viewer.summary import summary_of
from strop.run import RunFolder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "first")
    make_run(folder / "deeper" / "second", seed=2, steps=2, is_finished=False)
    return folder


def test_all_runs_below_a_folder_are_listed_with_what_tells_them_apart(folder: Path) -> None:
    record = cli("runs", folder, "--json").record
    assert record["differing_settings"] == ["model.path", "trainer.seed"], "the models lie beside them"
    runs = {run["name"]: run for run in record["runs"]}
    assert runs.keys() == {"first", "second"}
    assert runs["second"]["settings"]["trainer.seed"] == 2
    assert (runs["first"]["status"], runs["second"]["status"]) == ("finished", "stopped")
    assert (runs["first"]["steps_per_hour"], runs["second"]["step"]) == (100.0, 2)
    assert runs["first"]["reward"] == 1.0, "of the last tenth of the steps, at least one"
    assert (runs["first"]["low"], runs["first"]["high"]) == (0.1, 0.9)
    shown = cli("runs", folder).out
    assert "20.0 -> 80.0 % (10.0 to 90.0)" in shown


def test_a_loss_is_no_reward_and_no_heading_is_cut(tmp_path: Path) -> None:
    for number in range(2):
        settings = {"sft": dict.fromkeys(("beginning", "middle_part", "very_end"), f"{number}" * 30)}
        with RunFolder.create(tmp_path / f"{number}", config=settings, command=["strop", "sft"]) as run:
            run.events.append("step", 1, seconds=1.0, phases={}, loss=0.25)
    shown = cli("runs", tmp_path).out
    assert shown.count("loss 0.25") == 2
    assert "beginning" in shown
    assert "very_end" not in shown
    assert "…" not in shown, shown
    assert "they differ in 3 settings" in shown


def test_samples_of_a_run_that_plays_nothing(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "x", config={}, command=["strop", "sft", "model.path=m"]).close()
    sentence = cli("samples", tmp_path / "x").sentence
    assert "has no train samples: it is a run of `strop sft`, which plays no prompts" in sentence


def test_one_run_can_be_named_and_is_running_while_somebody_writes_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", is_finished=False)
    with RunFolder.open(run) as writer:
        writer.events.append("crashed", 4, error="CUDA error: out of memory\nmore", phase="gen")
        (found,) = cli("runs", run, "--json").record["runs"]
        assert found["status"] == "running"
    (found,) = cli("runs", run, "--json").record["runs"]
    assert (found["status"], found["reason"]) == ("failed", "CUDA error: out of memory")
    with RunFolder.open(run) as writer:
        writer.events.append("restarted", 3, cause="a worker died", number=1)
    (found,) = cli("runs", run, "--json").record["runs"]
    assert (found["status"], found["reason"]) == ("stopped", ""), "it went on, and ended without a word"


def test_folders_without_runs(tmp_path: Path) -> None:
    assert "no run below" in cli("runs", tmp_path).out
    assert cli("runs", tmp_path, "--json").record["runs"] == []
    assert "is not there" in cli("runs", tmp_path / "nothing").sentence
    assert "no run is below" in cli("plot", tmp_path, "-o", tmp_path / "a.png").sentence


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_curves_are_drawn_in_the_format_of_the_file(
    folder: Path, tmp_path: Path, name: str, begins: bytes
) -> None:
    result = cli("plot", folder, "-o", tmp_path / name, "--x", "tokens", "--smooth", 2, "--json")
    assert result.code == 0, result.err
    assert len(result.record["runs"]) == 2
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_what_cannot_be_drawn_is_said(folder: Path, tmp_path: Path) -> None:
    assert "is no picture that can be drawn" in cli("plot", folder, "-o", tmp_path / "a.txt").sentence
    wrong = cli("plot", folder, "-o", tmp_path / "a.png", "--metric", "actor/entropie").sentence
    assert "did you mean actor/entropy" in wrong
    assert not (tmp_path / "a.png").exists()
    assert "--smooth is 0" in cli("plot", folder, "-o", tmp_path / "a.png", "--smooth", 0).sentence


def test_panels_hold_the_numbers_of_the_runs(folder: Path) -> None:
    from strop.cli.commands.runs import read_runs
    from strop.observability.viewer.plot import figure_of_runs

    runs = read_runs([folder / "first"])
    rewards, entropies = figure_of_runs(
        runs, [["critic/rewards/mean"], ["actor/entropy"]], axis="samples"
    ).axes
    (line,) = rewards.lines
    assert list(line.get_xdata()) == [6, 12, 18, 24]
    assert list(line.get_ydata()) == [0.25, 0.5, 0.75, 1.0]
    assert entropies.get_ylabel() == "actor/entropy"


def test_a_mean_of_steps_begins_with_fewer() -> None:
    assert smoothed({1: 2.0, 2: 4.0, 5: 6.0, 6: 8.0}, 2) == {1: 2.0, 2: 3.0, 5: 5.0, 6: 7.0}
    assert smoothed({1: 2.0, 2: 4.0}, 1) == {1: 2.0, 2: 4.0}


def test_validations_without_pass_rates_are_shown_by_their_rewards(tmp_path: Path) -> None:
    """The best is that of the highest mean reward, also below zero; no percent sign stands beside it."""
    with RunFolder.create(tmp_path / "run", config={}, command=["strop", "train"]) as run:
        for step, reward in enumerate((-0.5, -0.2, -0.3)):
            run.events.append("validation", step, pass_rate=None, reward=reward, num_answers=4, metrics={})
    records = RunRecords(tmp_path / "run")
    records.read_on()
    found = summary_of(records)
    assert (found.pass_rate_start, found.pass_rate_final, found.best_pass_rate) == (None, None, None)
    assert (found.val_reward, found.best_val_reward, found.best_step) == (-0.3, -0.2, 1)
    assert (_rate(found), _best(found)) == ("mean reward -0.3", "-0.2 @1")
