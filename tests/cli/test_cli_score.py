"""`strop score`: a reward over the answers of a run or of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_calls import Project, cli

ROWS: list[dict[str, Any]] = [
    {"id": "a", "data_source": "s1", "response": "12", "ground_truth": "12", "score": 0.0, "level": 3},
    {"id": "b", "data_source": "s1", "response": "boom", "ground_truth": "12", "score": 0.5},
    {"id": "c", "data_source": "s2", "response": "1", "ground_truth": "12", "score": 0.0},
]
REWARD = """
def compute_score(solution_str, ground_truth, **_):
    if solution_str == "boom":
        raise ValueError("[red]boom\\x1b[31m")
    return {"score": float(solution_str == ground_truth), "chars": len(solution_str)}

def levels(completions, level=None, **columns):
    return [float(level[0]) if level and level[0] else None]
"""


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "reward.py").write_text(REWARD)
    file = folder / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_table_shows_means_by_source_and_every_difference(tmp_path: Path) -> None:
    file = write(tmp_path, ROWS)
    result = cli("score", tmp_path / "reward.py", file)
    assert result.code == 0
    lines = [line.split() for line in result.out.splitlines()]
    assert ["s1", "2", "0.25", "1", "2", "1"] in [line[:6] for line in lines]
    assert ["s2", "1", "0", "0", "0", "0"] in [line[:6] for line in lines]
    assert "[red]boom\\x1b[31m" in result.out, "text of the function is shown, and not acted on"
    assert "\x1b" not in result.out
    assert result.out.endswith("2 of 3 scores changed\n")
    assert cli("score", tmp_path / "reward.py", file, "--check").code == 1


def test_json_has_every_difference_and_the_parts_by_source(tmp_path: Path) -> None:
    record = cli("score", tmp_path / "reward.py", write(tmp_path, ROWS), "--json").record
    assert (record["num_samples"], record["num_changed"]) == (3, 2)
    assert [(one["id"], one["old"], one["new"], one["outcome"]) for one in record["differences"]] == [
        ("a", 0.0, 1.0, "score"),
        ("b", 0.5, None, "error"),
    ]
    source = record["sources"]["s1"]
    assert (source["old_mean"], source["new_mean"], source["error"], source["parts"]) == (
        0.25,
        1.0,
        1,
        {"acc": 1.0, "chars": 2.0},
    )


def test_function_of_another_name_gets_the_columns_of_the_row(tmp_path: Path) -> None:
    result = cli("score", f"{tmp_path / 'reward.py'}:levels", write(tmp_path, ROWS[:1]), "--json")
    (difference,) = result.record["differences"]
    assert (difference["old"], difference["new"]) == (0.0, 3.0)


def test_file_without_scores_has_nothing_to_differ_from(tmp_path: Path) -> None:
    rows = [{name: value for name, value in row.items() if name != "score"} for row in ROWS[:1]]
    result = cli(
        "score", "builtin", write(tmp_path, rows), "--check", "--json", "data.default_data_source=exact"
    )
    assert (result.code, result.record["num_changed"]) == (1, 0), "s1 has no built-in scorer"
    rows[0]["data_source"] = ""
    result = cli(
        "score", "builtin", write(tmp_path, rows), "--check", "--json", "data.default_data_source=exact"
    )
    assert (result.code, result.record["sources"]["exact"]["new_mean"]) == (0, 1.0)


def test_reward_of_a_run_gives_its_own_scores_again(trained: Path, project: Project) -> None:
    for split in ("train", "val"):
        record = cli("score", "same", trained, "--split", split, "--check", "--json").record
        assert record["num_samples"] > 0
        assert record["num_changed"] == 0
    other = cli("score", "builtin", trained, "--step", "1", "--limit", "4", "--json").record
    assert other["num_samples"] == 4


MINE = """
class Mine:
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        pass

    def __len__(self):
        return 8

    def __getitem__(self, i):
        prompt = f"{i}" if i % 2 else [{"role": "user", "content": f"{i}"}]
        return {"prompt": prompt, "data_source": "mine", "reward_model": {"ground_truth": str(i)},
                "extra_info": {"shift": i, "raw": b"\\x00"}, "level": [i, {"deep": i}]}
"""
MINE_REWARD = """
def compute_score(solution_str, ground_truth, extra_info, **_):
    assert extra_info["raw"] == b"\\x00"
    return len(solution_str) % 3 + extra_info["shift"] / 16

def by_columns(completions, prompts, level, **columns):
    def one(completion, prompt, level):
        is_text = isinstance(completion, str)
        assert is_text == isinstance(prompt, str) == bool(level[0] % 2)
        return level[1]["deep"] + len(completion if is_text else completion[0]["content"]) % 2
    return [float(one(*each)) for each in zip(completions, prompts, level)]
"""


def test_rewards_over_rows_of_a_dataset_class_get_all_of_them_again(project: Project, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    reward = tmp_path / "reward.py"
    reward.write_text(MINE_REWARD)
    functions = f"[{{path: '{reward}', key: a}}, {{path: '{reward}', name: by_columns, key: b}}]"
    run = tmp_path / "run"
    overrides = [
        f"data.dataset_class={{path: '{tmp_path / 'mine.py'}', name: Mine}}", "reward.path=''",
        f"reward.functions={functions}", "trainer.max_steps=1", "trainer.preflight=false",
    ]  # fmt: skip
    trained = cli("train", "--config", project.config, "--out", run, *overrides)
    assert trained.code == 0, trained.err
    for split in ("train", "val"):
        record = cli("score", "same", run, "--split", split, "--check", "--json").record
        assert (record["num_changed"], record["sources"]["mine"]["error"]) == (0, 0), record
        assert record["sources"]["mine"]["new_mean"] > 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["same"], "`same` is the reward of a run, and SAMPLES is no run folder"),
        (["reward.txt"], "REWARD is 'reward.txt'; give FILE.py"),
        (["builtin", "--step", "1"], "--step and --split choose samples of a run"),
        (["builtin", "--limit", "0"], "--limit is 0; use at least 1"),
        (["nowhere.py"], "reward.path is 'nowhere.py', but"),
    ],
)
def test_calls_that_cannot_be_carried_out(tmp_path: Path, words: list[str], sentence: str) -> None:
    reward, *rest = words
    assert sentence in cli("score", reward, write(tmp_path, ROWS), *rest).sentence


def test_row_without_an_answer_names_the_columns(tmp_path: Path) -> None:
    sentence = cli("score", "builtin", write(tmp_path, [{"text": "x", "data_source": "exact"}])).sentence
    assert "row 0 has no answer as text: name the column response" in sentence
    assert "columns found: text, data_source" in sentence
