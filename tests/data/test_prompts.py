from __future__ import annotations

from typing import Any

import pytest

from references.chat_templates import CHATML, LLAMA3, LLAMA3_CONTROL, make_tokenizer
from strop.data import DataConfig, PromptDataset


def config(**changes: Any) -> DataConfig:
    return DataConfig(**{"train_files": ("x.parquet",), "prompts_per_step": 2, **changes})


def row(text: str, **changes: Any) -> dict[str, Any]:
    return {
        "data_source": "strop/exact",
        "prompt": [{"role": "user", "content": text}],
        "ability": "text",
        "reward_model": {"style": "rule", "ground_truth": text[::-1]},
        "extra_info": {"index": 5, "split": "train"},
        **changes,
    }


def test_a_row_of_verls_schema_becomes_a_prompt() -> None:
    tokenizer = make_tokenizer(CHATML)
    dataset = PromptDataset([row("ab"), row("cd", agent_name="tools")], tokenizer, config(), "train")
    prompt = dataset.prompt(1, "e3-000001")
    assert (
        tokenizer.decode(list(prompt.token_ids)) == "<|im_start|>user\ncd<|im_end|>\n<|im_start|>assistant\n"
    )
    # 2 control tokens, "user\n", "cd", "\n"; then 1 and "assistant\n"
    assert len(prompt.token_ids) == 2 + 5 + 2 + 1 + 1 + 10
    assert (prompt.uid, prompt.row, prompt.agent_name) == ("e3-000001", 1, "tools")
    assert prompt.messages == ({"role": "user", "content": "cd"},)
    assert (prompt.data_source, prompt.ground_truth) == ("strop/exact", "dc")
    assert prompt.extra_info == {"index": 5, "split": "train"}
    assert prompt.columns == {"ability": "text"}
    assert dataset.prompt(0, "e3-000000").agent_name == "single_turn_agent"


def test_the_template_is_used_without_tokens_of_the_tokenizers_own() -> None:
    tokenizer = make_tokenizer(LLAMA3, LLAMA3_CONTROL)
    tokenizer.bos_token = "<|begin|>"
    ids = PromptDataset([row(" ab ")], tokenizer, config(), "train").prompt(0, "e0-000000").token_ids
    text = "<|begin|><|header|>user<|/header|>\n\nab<|eot|><|header|>assistant<|/header|>\n\n"
    assert tokenizer.decode(list(ids)) == text
    assert ids.count(tokenizer.convert_tokens_to_ids("<|begin|>")) == 1


def test_a_trl_row_with_plain_columns() -> None:
    rows = [{"prompt": "ab", "answer": 4, "level": "easy"}]
    settings = config(ground_truth_key="answer", default_data_source="mine")
    prompt = PromptDataset(rows, make_tokenizer(CHATML), settings, "train").prompt(0, "e0-000000")
    assert prompt.messages == ({"role": "user", "content": "ab"},)
    assert (prompt.data_source, prompt.ground_truth) == ("mine", 4)
    assert prompt.extra_info == {}
    assert prompt.columns == {"answer": 4, "level": "easy", "prompt": "ab"}


def test_rows_need_no_ground_truth_when_none_is_mapped() -> None:
    rows = [{"prompt": "ab", "data_source": "judge"}]
    dataset = PromptDataset(rows, make_tokenizer(CHATML), config(ground_truth_key=None), "train")
    assert dataset.prompt(0, "e0-000000").ground_truth is None


def test_falsy_ground_truths_are_values() -> None:
    rows = [row("ab", reward_model={"ground_truth": value}) for value in (0, "", False, [])]
    dataset = PromptDataset(rows, make_tokenizer(CHATML), config(), "train")
    assert [dataset.prompt(index, "e0-000000").ground_truth for index in range(4)] == [0, "", False, []]


def test_long_prompts_are_dropped_counted_and_keep_their_row_numbers() -> None:
    # The template adds 19 tokens to the text (see the first test): 20, 29, 22, 39 tokens.
    rows = [row("a"), row("b" * 10), row("ccc"), row("d" * 20)]
    dataset = PromptDataset(rows, make_tokenizer(CHATML), config(max_prompt_tokens=28), "train")
    assert dataset.row_numbers == (0, 2)
    assert len(dataset) == 2
    assert dataset.prompt(2, "e0-000002").ground_truth == "ccc"
    assert dataset.report() == (
        "train: 2 prompts of 20 to 22 tokens (median 20); dropped 2 (50.0 %) longer than "
        "data.max_prompt_tokens=28"
    )
    with pytest.raises(KeyError, match="row 1 is not among the 2 rows"):
        dataset.prompt(1, "e0-000001")
    assert len(PromptDataset(rows, make_tokenizer(CHATML), config(max_prompt_tokens=29), "train")) == 3


def test_a_long_prompt_is_an_error_when_the_filter_is_off() -> None:
    settings = config(max_prompt_tokens=28, filter_overlong_prompts=False)
    with pytest.raises(
        ValueError, match="train row 1 has a prompt of 29 tokens.*raise that to 39 .*drop the 2 "
    ):
        PromptDataset([row("a"), row("b" * 10), row("d" * 20)], make_tokenizer(CHATML), settings, "train")


def test_no_prompt_left_tells_the_shortest_length() -> None:
    with pytest.raises(
        ValueError, match="no val prompt is left: all 2 are longer.*the shortest has 20 tokens"
    ):
        PromptDataset([row("aa"), row("b")], make_tokenizer(CHATML), config(max_prompt_tokens=5), "val")


def test_validation_prompts_are_spread_over_the_rows() -> None:
    rows = [row("abc") for _ in range(10)]
    settings = config(max_val_prompts=4)
    dataset = PromptDataset(rows, make_tokenizer(CHATML), settings, "val")
    assert dataset.row_numbers == (0, 2, 5, 7)
    assert dataset.report().endswith("; 6 left out by data.max_val_prompts=4")
    assert len(PromptDataset(rows, make_tokenizer(CHATML), settings, "train")) == 10
    assert len(PromptDataset(rows[:3], make_tokenizer(CHATML), settings, "val")) == 3


def test_missing_columns_are_told_together_with_those_found() -> None:
    rows = [row("ab"), {"question": "2+2?", "answer": "4"}]
    with pytest.raises(ValueError) as error:
        PromptDataset(rows, make_tokenizer(CHATML), config(), "train")
    assert str(error.value) == (
        "train row 1 has no value for 'prompt' (the prompt; map it with data.prompt_key); none for "
        "'data_source' (selects the scorer; map it with data.data_source_key, or name one for all rows with "
        "data.default_data_source); none for 'reward_model.ground_truth' (the right answer; map it with "
        "data.ground_truth_key=answer, or set that to null when the reward function needs none); columns "
        "found: question, answer"
    )


def test_a_tokenizer_without_chat_template_says_what_to_do() -> None:
    with pytest.raises(
        ValueError,
        match="no chat template.*instruct model, or name a Jinja template with model.chat_template",
    ):
        PromptDataset([row("ab")], make_tokenizer(None), config(), "train")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompt": 3}, "train row 0: column 'prompt' holds int 3"),
        ({"prompt": []}, r"column 'prompt' holds list \[\]"),
        ({"prompt": [{"content": "hi"}]}, "message 1 of column 'prompt' is dict .* needs a \"role\""),
        ({"prompt": ["hi"]}, "message 1 of column 'prompt' is str 'hi'"),
        (
            {"prompt": [{"role": "user"}]},
            "train row 0: the chat template cannot render the messages .roles: user",
        ),
        ({"extra_info": "text"}, "column 'extra_info' holds a str"),
        (
            {"images": [{"path": "a.png"}]},
            "train row 0 has 0 placeholders <image> .* 1 images in column 'images'",
        ),
        ({"tools": "{broken"}, "column 'tools' is text that is not JSON"),
        ({"tools": {"name": "x"}}, "column 'tools' holds dict"),
    ],
)
def test_malformed_rows_are_named(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        PromptDataset([row("ab", **changes)], make_tokenizer(CHATML), config(), "train")


def test_a_template_that_refuses_roles_is_quoted() -> None:
    template = "{{ raise_exception('only user messages') }}"
    with pytest.raises(ValueError, match="train row 0: .*only user messages"):
        PromptDataset([row("ab")], make_tokenizer(template), config(), "train")


def test_a_prompt_of_no_tokens_is_named() -> None:
    with pytest.raises(ValueError, match="train row 0 has a prompt of no tokens"):
        PromptDataset([row("ab")], make_tokenizer("{{ '' }}"), config(), "train")


def test_tools_and_template_variables_reach_the_template_and_count() -> None:
    template = "{{ mood }}{{ enable_thinking }}{% for t in tools or [] %}[{{ t['name'] }}]{% endfor %}"
    tokenizer = make_tokenizer(template)
    tools = [{"name": "add", "default": None}]
    rows = [row("x"), row("x", tools=tools, enable_thinking=False), row("x", tools='[{"name": "sub"}]')]
    settings = config(chat_template_kwargs={"mood": "calm", "enable_thinking": True})
    dataset = PromptDataset(rows, tokenizer, settings, "train")
    texts = [tokenizer.decode(list(dataset.prompt(index, "e0-000000").token_ids)) for index in range(3)]
    assert texts == ["calmTrue", "calmFalse[add]", "calmTrue[sub]"]


def test_a_row_may_have_variables_of_its_own() -> None:
    tokenizer = make_tokenizer("{{ mood }}{{ enable_thinking }}")
    own = [{"mood": "wild", "enable_thinking": None}, {"enable_thinking": False}, {"mood": "shy"}, None]
    rows = [row("x", chat_template_kwargs=variables) for variables in own]
    rows[2]["enable_thinking"] = False
    settings = config(chat_template_kwargs={"mood": "calm", "enable_thinking": True})
    dataset = PromptDataset(rows, tokenizer, settings, "train")
    texts = [tokenizer.decode(list(dataset.prompt(index, "e0-000000").token_ids)) for index in range(4)]
    assert texts == ["wildTrue", "calmFalse", "shyFalse", "calmTrue"]


@pytest.mark.parametrize(
    ("own", "match"),
    [
        (
            '{"enable_thinking": false}',
            "holds str .*; it must be an object with variables of the chat template",
        ),
        ({"add_generation_prompt": False}, "has add_generation_prompt, which is no variable of a template"),
    ],
)
def test_variables_of_a_row_that_are_none_are_refused(own: Any, match: str) -> None:
    with pytest.raises(ValueError, match=f"train row 0: column 'chat_template_kwargs' {match}"):
        PromptDataset([row("x", chat_template_kwargs=own)], make_tokenizer(CHATML), config(), "train")


def test_keys_that_parquet_filled_with_none_are_dropped() -> None:
    messages = [{"role": "user", "content": "ab", "tool_calls": None, "meta": {"a": 1, "b": None}}]
    dataset = PromptDataset([row("ab", prompt=messages)], make_tokenizer(CHATML), config(), "train")
    assert dataset.prompt(0, "e0-000000").messages == ({"role": "user", "content": "ab", "meta": {"a": 1}},)


def test_more_rows_than_one_tokenizer_call_takes() -> None:
    rows = [row(f"{number:04d}") for number in range(1100)]
    tokenizer = make_tokenizer(CHATML)
    dataset = PromptDataset(rows, tokenizer, config(), "train")
    assert len(dataset) == 1100
    for number in (0, 511, 512, 1023, 1024, 1099):
        ids = dataset.prompt(number, "e0-000000").token_ids
        assert tokenizer.decode(list(ids)).startswith(f"<|im_start|>user\n{number:04d}<|im_end|>")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"prompts_per_step": 0}, "data.prompts_per_step is 0"),
        ({"max_prompt_tokens": 0}, "data.max_prompt_tokens is 0"),
        ({"max_response_tokens": -1}, "data.max_response_tokens is -1"),
        ({"max_val_prompts": 0}, "data.max_val_prompts is 0"),
        ({"prompt_key": ""}, "data.prompt_key is '', .* name a column"),
        ({"ground_truth_key": ""}, "data.ground_truth_key is '', .*null"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        config(**changes)
