"""Marks of a template in one turn of several, and how trained answers end."""

from __future__ import annotations

from typing import Any

import pytest
from test_sft_conversations import TWO_TURNS, assistant, at_most, trained, user

from references.chat_templates import CHATML, make_tokenizer
from strop.data import SftDataset
from strop.data.preference_config import PreferDataConfig
from strop.data.preference_rows import PreferenceDataset

HEAD = "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' }}{%- if m['role'] == 'assistant' %}"
TAIL = """{%- else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# What is written before an answer by the template, not by the model, is not marked.
NOTED = (
    HEAD
    + "{{ '(note)' }}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    + TAIL
)
# Two marked pieces in every turn.
IN_PIECES = (
    HEAD + "{% generation %}{{ 'A' }}{% endgeneration %}{{ '-' }}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}" + TAIL
)  # fmt: skip
OPEN = HEAD + "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\\n' }}" + TAIL
ONLY_LAST = (
    HEAD + "{%- if loop.last %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{%- else %}{{ m['content'] + '<|im_end|>\\n' }}{%- endif %}" + TAIL
)  # fmt: skip


@pytest.mark.parametrize(
    ("template", "last"),
    [
        (NOTED, ["so on<|im_end|>"]),
        (IN_PIECES, ["A", "so on<|im_end|>"]),
        (ONLY_LAST, ["so on<|im_end|>"]),
        (CHATML, ["so on<|im_end|>"]),
    ],
    ids=["noted", "in pieces", "only the last", "no marks"],
)
def test_the_last_turn_alone_is_trained_as_it_is_marked(template: str, last: list[str]) -> None:
    tokenizer = make_tokenizer(template)
    dataset = SftDataset([{"messages": TWO_TURNS}], tokenizer, at_most(200, trained_turns="last"))
    assert trained(tokenizer, dataset) == last


def test_turns_that_messages_choose_are_trained_as_they_are_marked() -> None:
    tokenizer = make_tokenizer(NOTED)
    messages: list[dict[str, Any]] = [
        user("hi"),
        {**assistant("yo"), "loss_mask": 1},
        user("and?"),
        assistant("so on"),
    ]
    messages[3]["loss_mask"] = 0
    assert trained(tokenizer, SftDataset([{"messages": messages}], tokenizer, at_most(200))) == [
        "yo<|im_end|>"
    ]


def test_answers_to_a_conversation_are_compared_as_they_are_marked() -> None:
    tokenizer = make_tokenizer(NOTED)
    rows = [{"prompt": TWO_TURNS[:4], "chosen": "so on", "rejected": "no"}]
    (compared,) = PreferenceDataset(rows, tokenizer, PreferDataConfig(), loss="sigmoid")
    counted = [
        tokenizer.decode(
            [token for token, counts in zip(side.token_ids, side.loss_mask, strict=True) if counts]
        )
        for side in compared.pair
    ]
    assert counted == ["so on<|im_end|>", "no<|im_end|>"]


def test_an_end_in_the_text_of_an_answer_is_told() -> None:
    rows = [{"prompt": "hi", "completion": text} for text in ("yo<|im_end|>", "yo", "")]
    report = SftDataset(rows, make_tokenizer(NOTED), at_most(200)).report()
    assert (
        "WARNING: 1 answers end twice: their text has the '<|im_end|>' that the chat template writes, too"
        in report
    )
    assert "WARNING" not in SftDataset(rows[1:], make_tokenizer(NOTED), at_most(200)).report()


def test_marks_without_the_end_of_a_turn_are_told() -> None:
    tokenizer = make_tokenizer(OPEN)
    sentence = (
        "answers end without a control token, so the model will not learn to stop: the chat template should "
    )
    sentence += "include the end of a turn in its {% generation %} blocks"
    report = SftDataset([{"messages": TWO_TURNS}], tokenizer, at_most(200)).report()
    assert f"WARNING: 1 {sentence}" in report
    rows = [{"prompt": "hi", "chosen": "so on", "rejected": "no"}]
    report = PreferenceDataset(rows, tokenizer, PreferDataConfig(), loss="sigmoid").report()
    assert f"WARNING: 2 {sentence}" in report
    assert (
        "WARNING"
        not in PreferenceDataset(rows, make_tokenizer(NOTED), PreferDataConfig(), loss="sigmoid").report()
    )


def test_an_end_that_other_programs_do_not_know_is_told() -> None:
    tokenizer = make_tokenizer(CHATML, ("<|im_start|>", "<|im_end|>", "<|eos|>"))
    dataset = SftDataset([{"messages": TWO_TURNS}, {"messages": TWO_TURNS}], tokenizer, at_most(200))
    (eos, end) = tokenizer.convert_tokens_to_ids(["<|eos|>", "<|im_end|>"])
    assert dataset.ends.note({eos}).startswith(
        "2 answers end with '<|im_end|>', which neither the tokenizer nor the"
    )
    assert dataset.ends.note({eos, end}) == ""
