"""`strop compare`: answers that are there, and models that answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_calls import Project, cli

from strop.evaluation.paired_test import compare_paired


def answers(path: Path, passed: dict[str, list[bool]], prompt: str = "what") -> Path:
    rows = [
        {"id": f"{uid}/{place}", "prompt": [{"role": "user", "content": f"{prompt} {uid}"}], "passed": one}
        for uid, some in passed.items()
        for place, one in enumerate(some)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


BEFORE = {"val-0": [True, False], "val-1": [False, False], "val-2": [True, True], "val-3": [False, True]}
AFTER = {"val-0": [True, True], "val-1": [False, True], "val-2": [True, True], "val-3": [False, False]}


def _hundred(folder: Path, won: int, lost: int) -> tuple[Path, Path]:
    """Answers to 100 prompts, of which the second model answers so many more, and so many less, than the first.

    The chance of 7 of 8 signs or more that are the same is 2 (8 + 1) / 2^8 = 0.07; of 9 of 9, 2 / 2^9 = 0.004.
    """
    first = {f"val-{n}": [n >= won] for n in range(100)}
    second = {f"val-{n}": [n < 100 - lost] for n in range(100)}
    return answers(folder / "c.jsonl", first), answers(folder / "d.jsonl", second)


def test_answers_that_are_there_are_compared_by_prompt(tmp_path: Path) -> None:
    first, second = answers(tmp_path / "a.jsonl", BEFORE), answers(tmp_path / "b.jsonl", AFTER)
    record = cli("compare", first, second, "--json").record
    expected = compare_paired([0.5, 0.0, 1.0, 0.5], [1.0, 0.5, 1.0, 0.0])
    assert (record["difference"], record["low"], record["high"]) == (0.125, expected.low, expected.high)
    assert [one["pass_rate"] for one in record["models"]] == [0.5, 0.625]
    assert record["comparisons"][0]["p_value"] == expected.p_value
    text = cli("compare", first, second).out
    assert "b.jsonl less a.jsonl: +12.5 points (95 % interval" in text
    assert "not told apart: this many prompts show a difference of" in text
    few = cli("compare", *_hundred(tmp_path, 7, 1)).out
    assert "not told apart (the interval does not hold 0, but p is not below 0.05: few prompts differ)" in few
    won, lost = _hundred(tmp_path, 9, 0)
    assert "hold 0: d.jsonl is better on prompts of this kind" in cli("compare", won, lost).out
    assert "hold 0: d.jsonl is better on prompts of this kind" in cli("compare", lost, won).out
    three = cli("compare", first, second, first, "--json").record
    assert [one["difference"] for one in three["comparisons"]] == [0.125, 0.0]


def test_answers_without_a_verdict_are_compared_by_their_scores(tmp_path: Path) -> None:
    """Means by prompt 0.5 and 0.2 against 0.75 and 0.4: 0.225 more; an answer without a score is in no mean."""
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path, rows in (
        (first, [("val-0/0", None, 0.5), ("val-1/0", None, 0.2), ("val-1/1", False, None)]),
        (second, [("val-0/0", True, 1.0), ("val-0/1", None, 0.5), ("val-1/0", None, 0.4)]),
    ):
        lines = [{"id": i, "prompt": i.partition("/")[0], "passed": p, "score": s} for i, p, s in rows]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = cli("compare", str(first), str(second), "--json").record
    assert record["difference"] == pytest.approx(0.225)
    assert [one["pass_rate"] for one in record["models"]] == [None, None]
    assert [one["mean_reward"] for one in record["models"]] == pytest.approx([0.35, 0.575])
    # Standard errors 0.15 and 0.175, and t = 12.706205 with 1 degree of freedom.
    assert [(one["low"], one["high"]) for one in record["models"]] == [
        pytest.approx((0.35 - 1.905931, 0.35 + 1.905931), abs=1e-6),
        pytest.approx((0.575 - 2.223586, 0.575 + 2.223586), abs=1e-6),
    ]
    text = cli("compare", str(first), str(second)).out
    assert "b.jsonl  mean reward 0.575 (95 % interval -1.649 to 2.799)" in text
    assert "b.jsonl less a.jsonl: +0.225 (95 % interval" in text
    assert "points" not in text


def test_models_answer_the_same_prompts_with_the_same_settings(project: Project, tmp_path: Path) -> None:
    words = [
        "--config",
        project.config,
        "data.max_val_prompts=3",
        "eval.samples_per_prompt=2",
        "eval.temperature=1",
    ]
    out = tmp_path / "answers.jsonl"
    assert cli("eval", project.model, *words, "--out", out).code == 0
    record = cli("compare", project.model, out, *words, "--data", project.data("val"), "--json").record
    assert (record["difference"], record["num_differing"], record["num_prompts"]) == (0.0, 0, 3)
    both = cli("compare", project.model, project.model, *words, "--json").record
    assert both["models"][0]["pass_rate"] == both["models"][1]["pass_rate"]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ('{"id": "a/0"}\n', "does not say whether it passed"),
        ("[1]\n", "line 1 of"),
        ("", "there is no answer to compare"),
    ],
)
def test_files_that_hold_no_answers_are_refused(tmp_path: Path, rows: str, sentence: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(rows)
    assert sentence in cli("compare", path, path).sentence


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    def sentence(*words: Any) -> str:
        return cli("compare", *words).sentence

    first = answers(tmp_path / "a.jsonl", BEFORE)
    other = answers(tmp_path / "b.jsonl", BEFORE, prompt="which")
    fewer = answers(tmp_path / "c.jsonl", {"val-0": [True]})
    assert "were not asked the same: 4 and 4 prompts; val-0 is another one" in sentence(first, other)
    assert "4 and 1 prompts" in sentence(first, fewer)
    assert "name both" in sentence(first)
    assert "would do nothing" in sentence(first, first, "eval.temperature=1")
    assert "does not exist" in sentence(first, tmp_path / "nothing")
