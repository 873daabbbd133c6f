"""Rows of comparisons: the forms that data sets have, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.data.preference_config import PreferDataConfig
from strop.data.preference_rows import PreferenceDataset
from strop.data.sft.stored_conversation import SftExample
from strop.engines.config import ModelConfig
from strop.engines.tokenizer import load_tokenizer

PAIR = {"prompt": "hi", "chosen": "Yes", "rejected": "no"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(ModelConfig(path=str(tiny_model)))


def texts(tokenizer: Any, side: SftExample) -> tuple[str, str]:
    """The whole conversation, and what of it counts."""
    kept = [token for token, counts in zip(side.token_ids, side.loss_mask, strict=True) if counts]
    return tokenizer.decode(side.token_ids), tokenizer.decode(kept)


@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {"prompt": [user("hi")], "chosen": [assistant("Yes")], "rejected": [assistant("no")]},
        {"chosen": [user("hi"), assistant("Yes")], "rejected": [user("hi"), assistant("no")]},
        {"prompt": "hi", "chosen": [user("hi"), assistant("Yes")], "rejected": [user("hi"), assistant("no")]},
    ],
    ids=["texts", "messages", "conversations", "both"],
)
def test_every_form_is_the_same_comparison(tokenizer: Any, row: dict[str, Any]) -> None:
    (example,) = PreferenceDataset([row], tokenizer, PreferDataConfig(), loss="sigmoid")
    expected = PreferenceDataset([PAIR], tokenizer, PreferDataConfig(), loss="sigmoid")[0]
    assert example == expected
    assert [texts(tokenizer, side)[1] for side in example.pair] == ["Yes<|im_end|>", "no<|im_end|>"]


def test_margins_are_read_for_a_reward_model(tokenizer: Any) -> None:
    rows = [{**PAIR, "margin": 2}, PAIR, {**PAIR, "margin": None}]
    dataset = PreferenceDataset(rows, tokenizer, PreferDataConfig(), loss="reward")
    assert [one.margin for one in dataset] == [2.0, 0.0, 0.0]
    renamed = PreferDataConfig(margin_key="by")
    assert PreferenceDataset([{**PAIR, "by": 0.5}], tokenizer, renamed, loss="reward")[0].margin == 0.5


def test_empty_answers_are_counted(tokenizer: Any) -> None:
    rows = [PAIR, {**PAIR, "rejected": ""}]
    dataset = PreferenceDataset(rows, tokenizer, PreferDataConfig(), loss="sigmoid")
    assert texts(tokenizer, dataset[1].pair[1])[1] == "<|im_end|>"
    assert dataset.report().endswith("; 1 with an empty answer")


def test_a_reward_model_reads_the_conversation_to_its_end(tokenizer: Any) -> None:
    (example,) = PreferenceDataset([PAIR], tokenizer, PreferDataConfig(), loss="reward")
    text = tokenizer.apply_chat_template([user("hi"), assistant("Yes")], tokenize=False)
    assert tokenizer.decode(example.pair[0].token_ids[:-1]) == text
    assert example.pair[0].loss_mask.index(True) == len(example.pair[0].token_ids) - 1


def test_whole_conversations_may_begin_with_a_greeting(tokenizer: Any) -> None:
    begun = [assistant("hello"), user("hi")]
    row = {"chosen": [*begun, assistant("Yes")], "rejected": [*begun, assistant("no")]}
    (example,) = PreferenceDataset([row], tokenizer, PreferDataConfig(), loss="sigmoid")
    assert [texts(tokenizer, side)[1] for side in example.pair] == ["Yes<|im_end|>", "no<|im_end|>"]
    # Beside a prompt, answers that begin alike are answers to it.
    (example,) = PreferenceDataset([{**row, "prompt": "hi"}], tokenizer, PreferDataConfig(), loss="sigmoid")
    assert texts(tokenizer, example.pair[0])[1] == "hello<|im_end|>Yes<|im_end|>"


def test_a_system_prompt_in_a_column_of_its_own_is_said(tokenizer: Any) -> None:
    row = {**PAIR, "system": "be brief"}
    said = PreferenceDataset([row], tokenizer, PreferDataConfig(), loss="sigmoid").report()
    assert "WARNING: column 'system' of 1 rows is not read" in said
    rated = [{**row, "completion": "a", "label": True}, {**row, "completion": "b", "label": False}]
    assert (
        "'system' of 2 rows" in PreferenceDataset(rated, tokenizer, PreferDataConfig(), loss="kto").report()
    )


def test_what_a_reward_model_is_not_shown_in_a_run_is_said(tokenizer: Any) -> None:
    rows = [PAIR, {**PAIR, "tools": [{"type": "function", "function": {"name": "f"}}]}]
    said = PreferenceDataset(rows, tokenizer, PreferDataConfig(), loss="reward").report()
    assert (
        "WARNING: the template of 2 conversations is given tools or variables" in said
    )  # both sides of the second
    with_variables = PreferDataConfig(chat_template_kwargs={"enable_thinking": False})
    assert "WARNING" not in PreferenceDataset([PAIR], tokenizer, with_variables, loss="sigmoid").report()
    assert (
        "of 2 conversations" in PreferenceDataset([PAIR], tokenizer, with_variables, loss="reward").report()
    )


def test_a_reward_model_reads_up_to_its_padding_token(tokenizer: Any) -> None:
    """A classifier of transformers scores the last token that is no padding; here turns end with padding."""
    whole = PreferenceDataset([PAIR], tokenizer, PreferDataConfig(), loss="reward")[0]
    cut = PreferenceDataset(
        [PAIR], tokenizer, PreferDataConfig(), loss="reward", padding=tokenizer.eos_token_id
    )[0]
    assert whole.pair[0].token_ids[-2] == tokenizer.eos_token_id
    assert cut.pair[0].token_ids == (*whole.pair[0].token_ids[:-2], 0)


@pytest.mark.parametrize("loss", ["sigmoid", "reward"])
def test_tool_calls_of_an_answer_that_the_template_leaves_out_are_refused(tokenizer: Any, loss: Any) -> None:
    call = {"type": "function", "function": {"name": "adder", "arguments": {}}}
    row = {**PAIR, "chosen": [{**assistant(""), "tool_calls": [call]}]}
    with pytest.raises(
        ValueError, match="train row 0: the chat template leaves out the tool calls of message 2"
    ):
        PreferenceDataset([row], tokenizer, PreferDataConfig(), loss=loss)


def test_rated_answers_have_another_ones_answer_beside_them(tokenizer: Any) -> None:
    labels = (True, False, 0)
    rows = [
        {"prompt": word, "completion": word.upper(), "label": label}
        for word, label in zip("abc", labels, strict=True)
    ]
    dataset = PreferenceDataset(rows, tokenizer, PreferDataConfig(), loss="kto")
    assert [one.is_good for one in dataset] == [True, False, False]
    assert [texts(tokenizer, one.pair[1])[1] for one in dataset] == [
        "B<|im_end|>",
        "C<|im_end|>",
        "A<|im_end|>",
    ]
    assert all(one.pair[0].token_ids[:3] == one.pair[1].token_ids[:3] for one in dataset)
    assert ", 1 of them good" in dataset.report()


def test_long_comparisons_are_dropped_and_counted(tokenizer: Any) -> None:
    rows = [PAIR, {**PAIR, "rejected": "n" * 40}]
    dataset = PreferenceDataset(rows, tokenizer, PreferDataConfig(max_tokens=30), loss="sigmoid")
    assert [one.pair[0].row for one in dataset] == [0]
    assert "dropped 1 (50.0 %) longer than prefer.data.max_tokens=30" in dataset.report()
    with pytest.raises(ValueError, match="no train comparison is left"):
        PreferenceDataset(rows[1:], tokenizer, PreferDataConfig(max_tokens=30), loss="sigmoid")


@pytest.mark.parametrize(
    ("row", "loss", "sentence"),
    [
        ({"prompt": "hi", "chosen": "a"}, "sigmoid", "train row 0 has no 'rejected'; columns found: prompt, chosen"),
        ({"chosen": "a", "rejected": "b"}, "sigmoid", "has no 'prompt', and its answers are no whole conversations"),
        ({**PAIR, "margin": "much"}, "reward", "has the margin 'much' in 'margin'; write a finite number"),
        ({**PAIR, "rejected": "Yes"}, "ipo", "compares an answer with itself"),
        (
            {"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("d")]}, "reward",
            "no conversations that begin alike",
        ),
        ({"prompt": "a", "completion": "b", "label": "good"}, "kto", "has 'good' in 'label'; write true or false"),
        ({"prompt": "a", "completion": "b"}, "kto", "an answer in 'completion' and true or false"),
        ({**PAIR, "images": ["a.png"]}, "sigmoid", "has images or videos, or an empty .* training on preferences"),
        ({"prompt": "a", "completion": "b", "label": True}, "kto", "has one row; prefer.loss=kto sets rows"),
    ],
)  # fmt: skip
def test_rows_that_say_nothing_are_named(
    tokenizer: Any, row: dict[str, Any], loss: Any, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        PreferenceDataset([row], tokenizer, PreferDataConfig(), loss=loss)


def test_null_cells_are_called_null_and_told_together(tokenizer: Any) -> None:
    rows = [
        PAIR,
        {**PAIR, "chosen": None},
        {**PAIR, "rejected": "Yes"},
        {**PAIR, "chosen": None, "rejected": None},
    ]
    for loss in ("sigmoid", "reward"):
        with pytest.raises(ValueError) as caught:
            PreferenceDataset(rows, tokenizer, PreferDataConfig(), loss=loss)
        assert str(caught.value) == (
            "3 of 4 train rows cannot be used; mend them, or take them out of prefer.data.train_files:\n"
            "  - row 1: has null in 'chosen', so there is nothing to compare: give the answer, or remove the row\n"
            "  - row 2: compares an answer with itself; remove the row\n"
            "  - row 3: has null in 'chosen' and 'rejected', so there is nothing to compare: give the answer, or "
            "remove the row"
        )
    with pytest.raises(ValueError, match="^val row 1 has null in 'prompt', and its answers are no whole"):
        PreferenceDataset(
            [PAIR, {**PAIR, "prompt": None}], tokenizer, PreferDataConfig(), loss="sigmoid", split="val"
        )
    rated = {"prompt": "hi", "completion": "yes", "label": True}
    rows = [rated, {**rated, "label": None}, {**rated, "completion": None}, {**rated, "label": "yes"}]
    with pytest.raises(ValueError, match="^3 of 4 train rows") as caught:
        PreferenceDataset(rows, tokenizer, PreferDataConfig(), loss="kto")
    assert "row 1: has null in 'label': give the answer and true or false" in str(caught.value)
    assert "row 2: has null in 'completion'" in str(caught.value)
    assert "row 3: has 'yes' in 'label'; write true or false, 1 or 0" in str(caught.value)
