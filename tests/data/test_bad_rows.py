"""Rows that cannot be used are counted and told together."""

from __future__ import annotations

from typing import Any

import pytest

from references.chat_templates import CHATML, make_tokenizer
from strop.data.bad_rows import BadRows, null_in
from strop.data.config import DataConfig
from strop.data.prompts import PromptDataset


def test_rows_are_grouped_by_what_is_wrong_with_them() -> None:
    bad = BadRows("train", 20, files="data.train_files")
    for number in range(20):
        with bad.reading(f"train row {number}"):
            if number % 2:
                raise ValueError(f"train row {number} has null in 'prompt'")
            if number == 8:
                raise ValueError(f"train row {number}: message 1 is 3")
    with pytest.raises(ValueError) as caught:
        bad.check()
    assert str(caught.value) == (
        "11 of 20 train rows cannot be used; mend them, or take them out of data.train_files:\n"
        "  - rows 1, 3, 5, 7, 9, 11 and 4 more: has null in 'prompt'\n"
        "  - row 8: message 1 is 3"
    )


def test_at_most_five_reasons_are_listed() -> None:
    bad = BadRows("val", 9, files="data.val_files")
    for number in range(8):
        with bad.reading(f"val row {number}"):
            raise ValueError(f"val row {number} is {number}")
    with pytest.raises(ValueError, match=r"^8 of 9 val rows (.*\n)+  - row 4: is 4\n  - and 3 more rows$"):
        bad.check()


def test_a_single_row_and_all_rows_keep_their_sentence() -> None:
    one, every = (BadRows("train", 2, files="data.train_files") for _ in range(2))
    one.check()
    with one.reading("train row 1"):
        raise ValueError("train row 1 is bad")
    with pytest.raises(ValueError, match="^train row 1 is bad$"):
        one.check()
    for number in range(2):
        with every.reading(f"train row {number}"):
            raise ValueError(f"train row {number} has no column 'a'")
    with pytest.raises(ValueError, match=r"^train row 0 has no column 'a' \(so it is in all 2 rows\)$"):
        every.check()


def test_a_null_is_told_from_a_column_that_is_not_there() -> None:
    assert null_in({"a": None, "b": 1, "c": None}, ["a", "b", "c", "d"]) == "null in 'a' and 'c'"
    assert null_in({"b": 1}, ["a", "b"]) == ""
    assert null_in({"a": float("nan"), "b": "nan"}, ["a", "b"]) == "NaN in 'a'"


def row(prompt: Any) -> dict[str, Any]:
    return {"prompt": prompt, "data_source": "s", "reward_model": {"ground_truth": "1"}}


def test_prompts_that_cannot_be_read_or_rendered_are_told_together() -> None:
    refused = [{"role": "tool", "content": "x"}]
    rows = [row("ok"), row(None), row(refused), row([3]), row(None), row("ok")]
    template = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tool first') }}{% endif %}" + CHATML
    with pytest.raises(ValueError) as caught:
        PromptDataset(rows, make_tokenizer(template), DataConfig(), "train")
    text = str(caught.value)
    assert text.startswith(
        "4 of 6 train rows cannot be used; mend them, or take them out of data.train_files:\n"
    )
    assert "  - rows 1, 4: has null in 'prompt': give a value, or remove the row" in text
    assert "  - row 2: the chat template cannot render the messages (roles: tool): no tool first" in text
    assert "  - row 3: message 1 of column 'prompt' is int 3" in text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"reward_model": {"ground_truth": float("nan")}},
            r"ground_truth' \(the right answer, where NaN stands",
        ),
        (
            {"reward_model": '{"ground_truth": "1"}'},
            "inside column 'reward_model', which holds a str and no obj",
        ),
        ({"reward_model": None}, r"ground_truth' \(the right answer; map it"),
        ({"prompt": float("nan")}, "has NaN in 'prompt'"),
        ({"data_source": float("nan")}, "has NaN in 'data_source'"),
    ],
)
def test_what_stands_in_place_of_a_value_is_named(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PromptDataset([row("ok") | changes], make_tokenizer(CHATML), DataConfig(), "train")


def test_a_class_label_of_0_is_a_data_source_and_an_answer() -> None:
    labelled = row("ok") | {"data_source": 0, "reward_model": {"ground_truth": 0}}
    settings = DataConfig(default_data_source="other")
    dataset = PromptDataset([labelled], make_tokenizer(CHATML), settings, "train")
    assert (dataset.prompt(0, "e0-000000").data_source, dataset.prompt(0, "e0-000000").ground_truth) == (
        "0",
        0,
    )


def test_a_system_prompt_in_a_column_of_its_own_is_said_to_be_unread() -> None:
    own = {"role": "system", "content": "Be brief."}
    rows = [
        row("ok") | {"system": "Be brief."},
        row("ok") | {"system": " "},
        row([own, {"role": "user", "content": "ok"}]) | {"system": "Be brief."},
    ]
    report = PromptDataset(rows, make_tokenizer(CHATML), DataConfig(), "train").report()
    assert report.endswith(
        "; WARNING: column 'system' of 1 rows is not read: write it into the prompt, or remove it"
    )
    assert "WARNING" not in PromptDataset(rows[1:], make_tokenizer(CHATML), DataConfig(), "train").report()
