"""`strop diff`, `strop samples` and `strop config show`: commands that only read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_calls import Project, cli

from strop.config import describe, load_config, read_config
from strop.observability.viewer.diff import changed_settings
from strop.run import RunFolder
from strop.trainer.config import Config


def make_run(folder: Path, stages: Sequence[dict[str, str]], rows: Sequence[dict[str, Any]] = ()) -> Path:
    """A run with these fingerprints, one mapping per step, and with samples of step 1."""
    with RunFolder.create(folder, config={"trainer": {"seed": 0}}, command=["strop", "train"]) as run:
        for step, digests in enumerate(stages, start=1):
            run.fingerprints.append(step, **digests)
        if rows:
            run.samples.write(1, [{"uid": "e0-000004", "sample_index": 0, **row} for row in rows])
    return folder


def test_runs_of_other_seeds_part_in_the_data_of_step_1(trained: Path, other_seed: Path) -> None:
    result = cli("diff", trained, other_seed)
    assert result.code == 1
    assert result.out.startswith("step 1 differs first in data; no step is equal\nfirst sample: e0-")
    assert "settings that differ: trainer.seed: 0 and 1\n" in result.out


def test_the_json_of_a_difference(trained: Path, other_seed: Path) -> None:
    result = cli("diff", trained, other_seed, "--json")
    assert result.code == 1
    assert (result.record["equal"], result.record["step"], result.record["stage"]) == (False, 1, "data")
    assert result.record["settings"] == {"trainer.seed": [0, 1]}
    same = cli("diff", trained, trained, "--json")
    assert same.code == 0
    assert (same.record["equal"], same.record["num_common_steps"], same.record["step"]) == (True, 2, None)


def test_a_longer_run_is_equal_over_the_common_steps(tmp_path: Path) -> None:
    long = make_run(tmp_path / "long", [{"data": "x"}, {"data": "y"}, {"data": "z"}])
    short = make_run(tmp_path / "short", [{"data": "x"}, {"data": "y"}])
    result = cli("diff", short, long)
    assert (result.code, result.out) == (
        0,
        "equal over 2 common steps (1 to 2); the longer run has 3 steps\n",
    )


@pytest.mark.parametrize(
    ("stage", "column", "values", "expected"),
    [
        ("prompt_tokens", "prompt_ids", ([1, 2], [1, 3]), "prompt_ids part at token 1: 2 and 3"),
        (
            "sampled_tokens",
            "response_ids",
            ([7, 8], [7]),
            "response_ids part at token 1: 8 and ended; the answers",
        ),
        (
            "log_probs",
            "rollout_log_probs",
            ([-0.5], [-0.25]),
            "rollout_log_probs part at token 0: -0.5 and -0.25",
        ),
        ("rewards", "score", (0.0, 1.0), "score 0.0 and 1.0"),
        ("advantages", "advantage", (-1.0, None), "advantage -1.0 and None"),
    ],
)
def test_the_first_differing_sample_is_named(
    tmp_path: Path, stage: str, column: str, values: tuple[Any, Any], expected: str
) -> None:
    runs = [
        make_run(
            tmp_path / name,
            [{"data": "same", stage: name}],
            [{"id": "e0-000004/0"}, {"id": "e0-000004/1", column: value}],
        )
        for name, value in zip("ab", values, strict=True)
    ]
    result = cli("diff", *runs)
    assert result.code == 1
    assert result.out.splitlines()[0] == f"step 1 differs first in {stage}; no step is equal"
    assert result.out.splitlines()[1].startswith(f"first sample: e0-000004/1: {expected}")


def test_a_stage_without_samples_names_no_sample(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / x, [{"data": "s", "weights": "w"}, {"data": "s", "weights": x}]) for x in "ab"
    ]
    result = cli("diff", *runs)
    assert result.out == "step 2 differs first in weights; 1 common step before it is equal\n"


def test_runs_without_common_steps_cannot_be_compared(tmp_path: Path, trained: Path) -> None:
    empty = make_run(tmp_path / "empty", [])
    assert "no step in common" in cli("diff", trained, empty).sentence
    assert "does not exist" in cli("diff", trained, tmp_path / "none").sentence


def test_settings_that_only_one_run_has_differ() -> None:
    a, b = {"x": {"y": 1, "z": 2}, "gone": None}, {"x": {"y": 1, "z": 3}, "new": 4}
    assert changed_settings(a, b) == {"x.z": [2, 3], "new": [None, 4]}


def test_samples_shows_the_last_step_and_says_how_many_there_are(trained: Path) -> None:
    result = cli("samples", trained, "--limit", 1)
    assert result.code == 0
    assert "step 2 · e0-" in result.out
    assert "expected" in result.out
    assert "acc=false" in result.out
    assert result.out.endswith("1 of 6 train samples of step 2; --limit 6 shows all\n")


def test_samples_by_id_and_step_as_json(trained: Path) -> None:
    with RunFolder.open(trained, read_only=True) as run:
        rows = run.samples.read(1)
    whole = cli("samples", trained, "--json", "--step", 1).record
    assert [row["id"] for row in whole["samples"]] == [row["id"] for row in rows]
    one = cli("samples", trained, "--json", "--id", rows[3]["id"]).record
    assert [row["response_ids"] for row in one["samples"]] == [rows[3]["response_ids"]]
    group = cli(
        "samples", trained, "--json", "--id", rows[3]["uid"], "--id", rows[0]["id"], "--limit", 2
    ).record
    assert group["num_found"] == 3
    assert len(group["samples"]) == 2
    val = cli("samples", trained, "--json", "--split", "val", "--step", 0).record
    assert [row["uid"] for row in val["samples"]] == [f"val-{index:06d}" for index in range(4)]


def graded(tmp_path: Path) -> Path:
    """Two prompts of two sources, three answers each; the second answers are cut, the last one has no score."""
    scores = {"e0-000000": [0.5, 0.0, 1.0], "e0-000001": [0.25, 0.75, None]}
    rows = [
        {
            "id": f"{uid}/{number}", "uid": uid, "sample_index": number, "score": score,
            "prompt": "p", "response": "r", "response_ids": [1],
            "data_source": f"source-{uid[-1]}", "stop_reason": "length" if number == 1 else "stop",
        }
        for uid, found in scores.items()
        for number, score in enumerate(found)
    ]  # fmt: skip
    return make_run(tmp_path / "run", [{"data": "x"}], rows)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--limit 2", ["0/0", "1/0"]),
        ("--limit 3", ["0/0", "1/0", "0/1"]),
        ("", ["0/0", "0/1", "0/2", "1/0", "1/1", "1/2"]),
        ("--sort worst", ["0/1", "1/0", "0/0", "1/1", "0/2", "1/2"]),
        ("--sort best --limit 2", ["0/2", "1/1"]),
        ("--cut", ["0/1", "1/1"]),
        ("--source source-1 --sort best", ["1/1", "1/0", "1/2"]),
    ],
)
def test_samples_are_chosen_and_ordered(tmp_path: Path, words: str, expected: list[str]) -> None:
    record = cli("samples", graded(tmp_path), "--json", *words.split()).record
    assert [row["id"].removeprefix("e0-00000") for row in record["samples"]] == expected


def test_a_choice_that_leaves_no_sample(tmp_path: Path) -> None:
    run = graded(tmp_path)
    sentence = cli("samples", run, "--source", "mine").sentence
    assert "no sample here is of the data source 'mine'; there are source-0, source-1" in sentence
    assert "none of these 1 samples was cut" in cli("samples", run, "--id", "e0-000000/0", "--cut").sentence
    assert "leave out --id, --tokens" in cli("samples", run, "--why-dropped", "--cut").sentence


def test_text_of_the_model_cannot_act_on_the_terminal(tmp_path: Path) -> None:
    row = {
        "id": "e0-000004/0", "prompt": "p", "response": "\x1b[2J[bold]hi[/bold]\x07", "error": "\x9b31m",
        "data_source": "\x1bq", "fate": "failed", "fate_reason": "\u202e", "stop_reason": "stop", "response_ids": [1],
    }  # fmt: skip
    run = make_run(tmp_path / "run", [{"data": "x"}], [row])
    result = cli("samples", run)
    assert result.code == 0
    assert "\\x1b[2J[bold]hi[/bold]\\x07" in result.out
    assert not set("\x1b\x07\x9b\u202e") & set(result.out)
    assert "no score" in result.out
    assert "failed (\\u202e)" in result.out


def test_samples_that_do_not_exist(tmp_path: Path, trained: Path) -> None:
    assert "step 9 has no train samples" in cli("samples", trained, "--step", 9).sentence
    assert "ids look like 'e0-" in cli("samples", trained, "--id", "zz").sentence
    assert "run.save_samples" in cli("samples", make_run(tmp_path / "run", [])).sentence
    assert "--limit is 0; use at least 1" in cli("samples", trained, "--limit", 0).sentence


def test_config_show_reads_back_equal(project: Project, tmp_path: Path) -> None:
    expected = load_config(Config, source=project.config, overrides=["algorithm=dapo_loss", "trainer.seed=5"])
    for extra in ([], ["--docs"]):
        result = cli(
            "config", "show", "--config", project.config, "algorithm=dapo_loss", "trainer.seed=5", *extra
        )
        assert result.code == 0
        (tmp_path / "shown.yaml").write_text(result.out)
        assert read_config(Config, tmp_path / "shown.yaml") == expected


def test_config_show_docs_explains_every_key() -> None:
    lines = cli("config", "show", "--docs").out.splitlines()
    place = lines.index("  samples_per_prompt: 8")
    assert "Trajectories per prompt." in lines[place - 2]
    assert f"{lines[place - 2]} {lines[place - 1]}".endswith("default 8)")
    comments = sum("default" in line for line in " ".join(lines).split("("))
    assert comments >= len(describe(Config))


def test_config_show_json_is_the_yaml() -> None:
    assert (
        cli("config", "show", "--json").record["rollout"]
        == yaml.safe_load(cli("config", "show").out)["rollout"]
    )
