"""Raw rows of well-known data sets become rows of verl's schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from references.chat_templates import CHATML, make_tokenizer
from strop.data import DataConfig, PromptDataset, read_rows
from strop.data.prepare import RECIPES, last_boxed, prepare_rows, write_rows

RAW: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "Two and 1,300?", "answer": "2 + 1300 = <<2+1300=1302>>1302\n#### 1,302"},
    "math": {
        "problem": "Half?",
        "solution": r"So \boxed{1} was wrong: $\boxed{\frac{1}{2}}$.",
        "level": "Level 1",
        "type": "Algebra",
    },
    "math500": {
        "problem": "Half?",
        "solution": "...",
        "answer": r"\frac{1}{2}",
        "subject": "Algebra",
        "level": 1,
    },
    "aime24": {
        "id": 60,
        "problem": "How many?",
        "solution": "...",
        "answer": "033",
        "url": "",
        "year": "2024",
    },
    "aime25": {"problem": "How many?", "answer": "70", "id": "0"},
    "geo3k": {"problem": "<image>Find x.", "answer": "3", "images": [{"bytes": b"png", "path": None}]},
    "dapo_math": {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "1+1?"}],
        "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    },
    "countdown": {"target": 98, "nums": [44, 19, 35]},
}
TRUTH = {
    "gsm8k": "1302",
    "math": r"\frac{1}{2}",
    "math500": r"\frac{1}{2}",
    "aime24": "33",
    "aime25": "70",
    "geo3k": "3",
    "dapo_math": "2",
    "countdown": {"target": 98, "numbers": [44, 19, 35]},
}


@pytest.mark.parametrize("name", RECIPES)
def test_rows_have_the_schema_of_verl(name: str, tmp_path: Path) -> None:
    prepared = prepare_rows(name, [RAW[name]], split="test")
    write_rows(tmp_path / "out" / "test.parquet", prepared.rows)
    (row,) = read_rows([tmp_path / "out" / "test.parquet"])
    assert row["reward_model"] == {"style": "rule", "ground_truth": TRUTH[name]}
    assert row["extra_info"]["split"] == "test"
    assert row["extra_info"]["index"] == 0
    (message,) = row["prompt"]
    assert message["role"] == "user"
    assert (prepared.num_repeated, [path.name for path in tmp_path.rglob("*.parquet")]) == (
        0,
        ["test.parquet"],
    )
    if name == "geo3k":
        assert row["images"] == [{"bytes": b"png", "path": None}]
        with pytest.raises(ValueError, match="has images or videos, but the model .* takes text alone"):
            PromptDataset([row], make_tokenizer(CHATML), DataConfig(), "train")
        return
    dataset = PromptDataset([row], make_tokenizer(CHATML), DataConfig(), "train")
    assert dataset.prompt(0, "e0-000000").ground_truth == TRUTH[name]


def test_gsm8k_with_the_tool_tells_the_tool_the_answer() -> None:
    (plain,) = prepare_rows("gsm8k", [RAW["gsm8k"]], split="train").rows
    (row,) = prepare_rows("gsm8k", [RAW["gsm8k"]], split="train", with_tool=True).rows
    assert row["agent_name"] == "tool_agent"
    assert row["extra_info"]["need_tools_kwargs"] is True
    assert row["extra_info"]["tools_kwargs"] == {
        "calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1302"}}
    }
    assert "calc_gsm8k_reward" in row["prompt"][0]["content"]
    assert "agent_name" not in plain
    assert "tools_kwargs" not in plain["extra_info"]
    assert plain["extra_info"]["question"] == "Two and 1,300?"
    with pytest.raises(ValueError, match="math has no form with a tool"):
        prepare_rows("math", [], split="train", with_tool=True)


def test_dapo_prompts_are_kept_once_and_plain_prompts_get_an_instruction() -> None:
    raw = [RAW["dapo_math"], RAW["dapo_math"], {"prompt": "2+2?", "solution": "4"}]
    prepared = prepare_rows("dapo_math", raw, split="train")
    assert prepared.num_repeated == 1
    assert [row["extra_info"]["index"] for row in prepared.rows] == [0, 2]
    assert prepared.rows[0]["prompt"][0]["content"] == "1+1?"
    assert prepared.rows[1]["prompt"][0]["content"].startswith("2+2?\n\nThink step by step. End with a line")
    assert prepared.rows[1]["reward_model"]["ground_truth"] == "4"
    repeated = [RAW["gsm8k"]] * 2  # two rows in the raw set are two rows here
    assert prepare_rows("gsm8k", repeated, split="train").num_repeated == 0


@pytest.mark.parametrize(
    ("answer", "truth"), [("033", "33"), (70, "70"), (" 204 ", "204"), (r"336^\circ", "336"), ("336°", "336")]
)
def test_answers_of_aime_are_whole_numbers_also_of_degrees(answer: str | int, truth: str) -> None:
    # Copies of AIME 2025 give the answer of II-5, an angle, with its unit.
    (row,) = prepare_rows("aime25", [{"question": "How many?", "answer": answer}], split="test").rows
    assert row["reward_model"]["ground_truth"] == truth


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{\frac{1}{2}} and \boxed{7", r"\frac{1}{2}"),
        (r"\fbox {a}", "a"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a \\ b}", r"a \\ b"),
        ("no box", None),
        (r"\boxed 5", None),
    ],
)
def test_the_last_box(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("name", "values", "match"),
    [
        ("gsm8k", {"text": "x"}, "raw row 1 has no text in 'question'; columns found: text. Is this the raw"),
        ("gsm8k", {"question": "q", "answer": "it is 5"}, "ends in 'it is 5', but solutions of GSM8K end in"),
        ("gsm8k", {"question": "q", "answer": "#### __import__('os')"}, "solutions of GSM8K end in"),
        ("math", {"problem": "p", "solution": "5"}, r"raw row 1 has no \\boxed"),
        ("geo3k", {"problem": "p", "answer": "3", "images": [b"x"]}, "0 placeholders <image> and 1 images"),
        ("geo3k", {"problem": "<image>", "answer": "3"}, "1 placeholders <image> and no images"),
        ("dapo_math", {"prompt": [{"role": "user", "content": "p"}]}, "not as DAPO-Math-17k is published"),
        ("countdown", {"nums": "1+1", "target": 2}, "needs whole numbers in 'nums'"),
        ("countdown", {"nums": [1, 2.5], "target": 2}, "needs whole numbers"),
    ],
)
def test_rows_of_something_else_are_named(name: str, values: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        prepare_rows(name, [RAW[name], values], split="train")


def test_unknown_recipes_and_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no recipe for 'gsm9k'; known: gsm8k, math"):
        prepare_rows("gsm9k", [], split="train")
    with pytest.raises(ValueError, match="must end in .parquet or .jsonl"):
        write_rows(tmp_path / "a.csv", [])
    geo = prepare_rows("geo3k", [RAW["geo3k"]], split="train").rows
    with pytest.raises(ValueError, match="rows with images need parquet"):
        write_rows(tmp_path / "a.jsonl", geo)
    rows = prepare_rows("countdown", [RAW["countdown"]], split="train").rows
    write_rows(tmp_path / "a.jsonl", rows)
    assert read_rows([tmp_path / "a.jsonl"]) == rows
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
