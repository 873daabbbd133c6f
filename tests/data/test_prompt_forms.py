"""Prompts that end with a message of the assistant, and messages that are JSON text."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from references.chat_templates import CHATML, make_tokenizer
from strop.data import DataConfig, PromptDataset, SftDataConfig, SftDataset
from strop.data.chat import Chat, from_json_text
from strop.data.file_check import examine
from strop.data.preference_config import PreferDataConfig
from strop.data.preference_rows import PreferenceDataset
from strop.evaluation.offline_answers import encoded
from strop.protocol.trajectory import Prompt, Trajectory, with_answer
from strop.rewards.wire import call_of

BEGUN = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "Let me think. The answer"},
]


def config(**changes: Any) -> DataConfig:
    return DataConfig(**{"train_files": ("x.parquet",), "ground_truth_key": None, **changes})


def row(prompt: Any) -> dict[str, Any]:
    return {"data_source": "x", "prompt": prompt}


def prompt_of(value: Any, **changes: Any) -> Prompt:
    return PromptDataset([row(value)], make_tokenizer(CHATML), config(**changes), "train").prompt(
        0, "e0-000000"
    )


# ------------------------------------------------------------------------- messages that the answer continues


def test_the_answer_goes_on_with_the_last_word_of_the_assistant() -> None:
    tokenizer = make_tokenizer(CHATML)
    expected = tokenizer.apply_chat_template(
        BEGUN, continue_final_message=True, add_generation_prompt=False, tokenize=True, return_dict=False
    )
    found = prompt_of(BEGUN)
    assert list(found.token_ids) == expected
    assert tokenizer.decode(expected).endswith("<|im_start|>assistant\nLet me think. The answer")
    assert list(found.messages) == BEGUN


def test_such_rows_are_refused_where_the_setting_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"train row 0 ends with a message of the assistant, and data\.continue"
    ):
        prompt_of(BEGUN, continue_final_message=False)
    assert prompt_of(BEGUN[:1], continue_final_message=False).messages == tuple(BEGUN[:1])


def test_a_reward_in_trls_form_gets_one_message_with_both_parts() -> None:
    prompt = prompt_of(BEGUN)
    started = Trajectory(uid=prompt.uid, sample_index=0, prompt_ids=prompt.token_ids)
    played = started.with_sampled((1, 2), (-0.1, -0.2), (0, 0))
    call = call_of(prompt, played, " is 4", wants_conversation=True)
    # As TRL's GRPOTrainer: the last message is taken off the prompt, and put before the completion.
    assert call["prompt"] == BEGUN[:1]
    assert call["completion"] == [{"role": "assistant", "content": "Let me think. The answer is 4"}]
    assert call["solution_str"] == " is 4"


def test_an_answer_of_a_file_is_encoded_behind_what_it_continues() -> None:
    tokenizer = make_tokenizer(CHATML)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chat = Chat(messages=tuple(BEGUN), where="row 0")
    asked, answered = encoded(tokenizer, chat, " is 4", [stop], "row 0")
    assert tokenizer.decode(asked + answered).endswith("assistant\nLet me think. The answer is 4<|im_end|>")
    assert tokenizer.decode(answered) == " is 4<|im_end|>"


def test_an_answer_to_train_on_does_not_continue_a_message() -> None:
    sentence = (
        "train row 0: the prompt ends with a message of the assistant, and the answer would not continue it"
    )
    with pytest.raises(ValueError, match=sentence):
        SftDataset([{"prompt": BEGUN, "completion": " is 4"}], make_tokenizer(CHATML), SftDataConfig())
    pair = {"prompt": BEGUN, "chosen": " is 4", "rejected": " is 5"}
    for loss in ("sigmoid", "reward"):
        with pytest.raises(ValueError, match=sentence):
            PreferenceDataset([pair], make_tokenizer(CHATML), PreferDataConfig(), loss=loss)


def test_parts_of_a_message_are_continued_by_a_part() -> None:
    begun = {"role": "assistant", "content": [{"type": "text", "text": "It"}]}
    assert with_answer([begun], " is")[-1]["content"] == [
        {"type": "text", "text": "It"}, {"type": "text", "text": " is"},
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["continue_final_message", "add_generation_prompt", "tokenize"])
def test_arguments_of_the_template_are_no_variables_of_it(name: str) -> None:
    with pytest.raises(ValueError, match=rf"data.chat_template_kwargs has {name}, .* leave it out"):
        config(chat_template_kwargs={name: True})
    with pytest.raises(ValueError, match=f"sft.data.chat_template_kwargs has {name}"):
        SftDataConfig(chat_template_kwargs={name: True})
    with pytest.raises(ValueError, match=f"prefer.data.chat_template_kwargs has {name}"):
        PreferDataConfig(chat_template_kwargs={name: True})


# ------------------------------------------------------------------------------- messages that are JSON text

ASKED = BEGUN[:1]


@pytest.mark.parametrize("text", [json.dumps(ASKED), json.dumps(ASKED, indent=2) + "\n", repr(ASKED)])
def test_messages_as_text_are_refused_read_or_taken_as_text(text: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"train row 0: column 'prompt' holds messages as JSON text; data\.json_messages=read reads",
    ):
        prompt_of(text)
    assert prompt_of(text, json_messages="read") == prompt_of(ASKED)
    assert prompt_of(text, json_messages="text").messages == ({"role": "user", "content": text},)


TEXTS = (
    "[1, 2]", '[{"rule": 1}]', "[role", '{"role": "user"}', "[]", "What is a role?",
    "[1, 2, 3]", '{"a": 1}', "[{ what does this mean? role", '{"role": "admin"} is wrong', '{"role": "admin"}',
    '"Who has the role of user?"', '[{"name": "x", "role": 3}]', "array([1.0, 2.0]) is what?",
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_other_texts_are_texts(text: str) -> None:
    assert prompt_of(text).messages == ({"role": "user", "content": text},)


def test_rows_of_fine_tuning_and_comparisons_are_read_alike() -> None:
    tokenizer = make_tokenizer(CHATML)
    whole = [*ASKED, {"role": "assistant", "content": "4"}]
    rows = [{"messages": json.dumps(whole)}]
    with pytest.raises(ValueError, match=r"column 'messages' holds .* sft\.data\.json_messages=read"):
        SftDataset(rows, tokenizer, SftDataConfig(max_tokens=200))
    read = SftDataset(rows, tokenizer, SftDataConfig(max_tokens=200, json_messages="read"))
    assert read[0] == SftDataset([{"messages": whole}], tokenizer, SftDataConfig(max_tokens=200))[0]
    answers = {
        "chosen": json.dumps(whole[1:]),
        "rejected": json.dumps([{"role": "assistant", "content": "5"}]),
    }
    compared = [{"prompt": json.dumps(ASKED), **answers}]
    with pytest.raises(ValueError, match=r"column 'chosen' holds .* prefer\.data\.json_messages=read"):
        PreferenceDataset(compared, tokenizer, PreferDataConfig(), loss="sigmoid")
    given = PreferenceDataset(compared, tokenizer, PreferDataConfig(json_messages="read"), loss="sigmoid")
    plain = [{"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}]
    assert given[0] == PreferenceDataset(plain, tokenizer, PreferDataConfig(), loss="sigmoid")[0]


HELLO = [{"role": "user", "content": "hi {x}"}, {"role": "assistant", "content": "a"}]
READ = {
    "printed by Python": str(HELLO),
    "encoded twice": json.dumps(json.dumps(HELLO)),
    "in an object": json.dumps({"messages": HELLO}),
    "one message": json.dumps(HELLO[0]),
}
UNREADABLE = {
    "printed by numpy": str(np.array(HELLO, dtype=object)),
    "a repr of numpy": repr(np.array(HELLO, dtype=object)),
    "cut off": json.dumps(HELLO)[:60],
    "an object cut off": json.dumps({"messages": HELLO})[:-2],
    "encoded twice and cut off": json.dumps(json.dumps(HELLO))[:70],
    "the content first": '[{"content": "hi", "role": "user"},',
    "an object with tools": json.dumps({"messages": HELLO, "tools": []}),
    "names of ShareGPT": '[{"from": "human", "value": "hi"}]',
}


@pytest.mark.parametrize("form", READ)
def test_messages_as_text_are_read_in_each_form(form: str) -> None:
    given = {"where": "train row 0", "key": "prompt", "setting": "data.json_messages"}
    with pytest.raises(ValueError, match="holds messages as JSON text"):
        from_json_text(READ[form], "refuse", **given)
    assert from_json_text(READ[form], "read", **given) == (HELLO[:1] if form == "one message" else HELLO)
    assert from_json_text(READ[form], "text", **given) == READ[form]


@pytest.mark.parametrize("form", UNREADABLE)
def test_what_looks_like_messages_and_is_none_is_refused(form: str) -> None:
    """None of them can be taken for what a user said, and none can be read for sure."""
    given = {"where": "train row 0", "key": "prompt", "setting": "data.json_messages"}
    for how in ("refuse", "read"):
        with pytest.raises(
            ValueError, match=r"train row 0: column 'prompt' holds a text that looks like messages"
        ):
            from_json_text(UNREADABLE[form], how, **given)  # type: ignore[arg-type]
    assert from_json_text(UNREADABLE[form], "text", **given) == UNREADABLE[form]


def test_calls_of_a_prompt_that_the_template_leaves_out_are_refused() -> None:
    call = {"type": "function", "function": {"name": "adder", "arguments": {"a": 1}}}
    said = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(
        ValueError, match="train row 0: the chat template leaves out the tool calls of message 2"
    ):
        prompt_of([*said, {"role": "user", "content": "go on"}])
    report = examine([row([*said, {"role": "user", "content": "go on"}])], make_tokenizer(CHATML), config())
    assert "leaves out the tool calls of message 2" in report.malformed[0]
