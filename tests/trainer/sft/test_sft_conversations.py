from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from references.chat_templates import CHATML, FORGETFUL, LLAMA3, LLAMA3_CONTROL, MARKED, make_tokenizer
from strop.data import SftDataConfig, SftDataset


def at_most(max_tokens: int, **settings: Any) -> SftDataConfig:
    return SftDataConfig(max_tokens=max_tokens, **settings)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def trained(tokenizer: PreTrainedTokenizerFast, dataset: SftDataset, index: int = 0) -> list[str]:
    """Text of each run of trained tokens."""
    example = dataset[index]
    runs: list[list[int]] = []
    previous = False
    for token, flag in zip(example.token_ids, example.loss_mask, strict=True):
        if flag and not previous:
            runs.append([])
        if flag:
            runs[-1].append(token)
        previous = flag
    return [tokenizer.decode(run) for run in runs]


TWO_TURNS = [
    {"role": "system", "content": "s"},
    user("hi"),
    assistant("yo"),
    user("and?"),
    assistant("so on"),
]


def test_chatml_trains_answers_and_their_end_but_not_the_new_line_after_it() -> None:
    tokenizer = make_tokenizer(CHATML)
    dataset = SftDataset([{"messages": TWO_TURNS}], tokenizer, at_most(200))
    assert trained(tokenizer, dataset) == ["yo<|im_end|>", "so on<|im_end|>"]
    assert tokenizer.decode(list(dataset[0].token_ids)) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nyo<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n"
        "<|im_start|>assistant\nso on<|im_end|>\n"
    )


def test_llama3_trims_and_closes_turns_with_its_own_token() -> None:
    tokenizer = make_tokenizer(LLAMA3, LLAMA3_CONTROL)
    messages = [user("hi"), assistant("  yo\n"), user("and?"), assistant("so on")]
    dataset = SftDataset([{"messages": messages}], tokenizer, at_most(200))
    assert trained(tokenizer, dataset) == ["yo<|eot|>", "so on<|eot|>"]


def test_marked_templates_decide_themselves_even_when_they_rewrite_turns() -> None:
    tokenizer = make_tokenizer(MARKED)
    messages = [user("hi"), assistant("<think>a</think>yo"), user("and?"), assistant("<think>b</think>so on")]
    dataset = SftDataset([{"messages": messages}], tokenizer, at_most(200))
    assert trained(tokenizer, dataset) == ["yo<|im_end|>", "<think>b</think>so on<|im_end|>"]


def test_a_template_that_rewrites_a_turn_is_refused_by_turn() -> None:
    tokenizer = make_tokenizer(FORGETFUL)
    messages = [user("hi"), assistant("<think>a</think>yo"), user("and?"), assistant("so on")]
    match = r"train row 1: .*not append-only at message 2 of 4 \(assistant\): it writes its text as '<think>a"
    with pytest.raises(ValueError, match=match):
        SftDataset([{"messages": messages[:2]}, {"messages": messages}], tokenizer, at_most(200))


def test_a_rewriting_template_serves_rows_that_it_does_not_rewrite() -> None:
    tokenizer = make_tokenizer(FORGETFUL)
    rows = [{"messages": [user("hi"), assistant("<think>a</think>yo")]}, {"messages": TWO_TURNS}]
    dataset = SftDataset(rows, tokenizer, at_most(200))
    assert trained(tokenizer, dataset, 0) == ["<think>a</think>yo<|im_end|>"]
    assert trained(tokenizer, dataset, 1) == ["yo<|im_end|>", "so on<|im_end|>"]


def test_a_generation_prompt_that_answers_do_not_begin_with_is_refused() -> None:
    tokenizer = make_tokenizer(
        CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif")
    )
    with pytest.raises(
        ValueError, match="message 2 of 2 .*the generation prompt before it as '<think>.*but as 'yo<"
    ):
        SftDataset([{"messages": [user("hi"), assistant("yo")]}], tokenizer, at_most(200))


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text("ab\n <>", max_size=6), min_size=1, max_size=4), llama=st.booleans())
def test_tokens_before_a_turn_are_the_prompt_a_rollout_is_given(texts: list[str], llama: bool) -> None:
    # "\n" + "\n" is one token, as in real vocabularies: an answer that begins with a new line would merge
    # with the header's.
    template, control = (LLAMA3, LLAMA3_CONTROL) if llama else (CHATML, ["<|im_start|>", "<|im_end|>"])
    tokenizer = make_tokenizer(template, control, [("\n", "\n"), ("a", "b")])
    messages = [message for text in texts for message in (user("q"), assistant(text))]
    example = SftDataset([{"messages": messages}], tokenizer, at_most(1000))[0]
    flags = [False, *example.loss_mask]
    starts = [i for i in range(len(example.token_ids)) if flags[i + 1] and not flags[i]]
    assert len(starts) == len(texts)
    text = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    first_prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert list(example.token_ids[: starts[0]]) == first_prompt
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(list(example.token_ids)) == whole
    runs = trained(tokenizer, SftDataset([{"messages": messages}], tokenizer, at_most(1000)))
    assert runs == [(text.strip() if llama else text) + control[-1] for text in texts]


def test_an_answer_that_would_merge_with_the_header_is_cut_there() -> None:
    tokenizer = make_tokenizer(CHATML, merges=[("\n", "\n")])
    dataset = SftDataset([{"messages": [user("q"), assistant("\nyo")]}], tokenizer, at_most(100))
    assert trained(tokenizer, dataset) == ["\nyo<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids("\n\n") not in dataset[0].token_ids


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_prompt_and_completion_train_the_completion_only(template: str) -> None:
    tokenizer = make_tokenizer(template)
    rows: list[dict[str, Any]] = [
        {"prompt": "hi", "completion": "yo"},
        {"prompt": [user("hi")], "completion": [assistant("yo"), user("and?"), assistant("so on")]},
        {"prompt": [user("hi"), assistant("given"), user("and?")], "completion": "so on"},
    ]
    dataset = SftDataset(rows, tokenizer, at_most(200))
    assert trained(tokenizer, dataset, 0) == ["yo<|im_end|>"]
    assert trained(tokenizer, dataset, 1) == ["yo<|im_end|>", "so on<|im_end|>"]
    assert trained(tokenizer, dataset, 2) == ["so on<|im_end|>"]


def test_tool_turns_carry_no_loss() -> None:
    tokenizer = make_tokenizer(CHATML)
    messages = [user("2+2?"), assistant("<call>"), {"role": "tool", "content": "4"}, assistant("four")]
    assert trained(tokenizer, SftDataset([{"messages": messages}], tokenizer, at_most(200))) == [
        "<call><|im_end|>",
        "four<|im_end|>",
    ]


def test_an_answer_before_any_question_is_not_trained() -> None:
    tokenizer = make_tokenizer(CHATML)
    messages = [assistant("welcome"), user("hi"), assistant("yo")]
    assert trained(tokenizer, SftDataset([{"messages": messages}], tokenizer, at_most(200))) == [
        "yo<|im_end|>"
    ]


CALL = {"id": "c1", "type": "function", "function": {"name": "adder", "arguments": {"a": 1}}}


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_tools_and_calls_that_the_template_leaves_out_are_refused(template: str) -> None:
    calling = [user("1+1"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    for row, sentence in (
        ({"messages": calling}, "train row 0: the chat template leaves out the tool calls of message 2"),
        (
            {"messages": [user("1+1"), assistant("2")], "tools": [CALL]},
            "shows no tool of column 'tools': use a",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            SftDataset([row], make_tokenizer(template), at_most(99))
    described = [{"role": "system", "content": "adder adds"}, user("1+1"), assistant("2")]
    assert (
        len(SftDataset([{"messages": described, "tools": [CALL]}], make_tokenizer(template), at_most(99)))
        == 1
    )


@pytest.mark.parametrize(
    ("template", "place"), [(CHATML, "+ m['content'] +"), (MARKED, "{% generation %}{{ text +")]
)
def test_thinking_that_the_template_leaves_out_is_refused(template: str, place: str) -> None:
    thinking = [user("1+1"), {**assistant("2"), "reasoning_content": "one and one"}]
    with pytest.raises(
        ValueError, match=r"leaves out the reasoning_content of message 2 \(assistant\): use a"
    ):
        SftDataset([{"messages": thinking}], make_tokenizer(template), at_most(99))
    writes = template.replace(place, place + " (m.reasoning_content or '') +")
    assert writes != template
    assert len(SftDataset([{"messages": thinking}], make_tokenizer(writes), at_most(99))) == 1


def test_marks_may_leave_the_thinking_of_earlier_answers_out() -> None:
    shown = "{{ (m.reasoning_content or '' if loop.last else '') + text +"
    forgetful = MARKED.replace("{% generation %}{{ text +", "{% generation %}" + shown)
    thinking = [user("1+1"), {**assistant("2"), "reasoning_content": "one and one"}]
    tokenizer = make_tokenizer(forgetful)
    dataset = SftDataset([{"messages": [*thinking, *thinking]}], tokenizer, at_most(99))
    assert trained(tokenizer, dataset) == ["2<|im_end|>", "one and one2<|im_end|>"]


def test_parts_of_the_prompt_that_no_mapping_takes_are_said() -> None:
    alpaca = {"instruction": "add", "input": "1+1", "output": "2", "system": "be brief"}
    mapped = at_most(99, prompt_key="instruction", completion_key="output")
    said = SftDataset(
        [alpaca, {**alpaca, "input": "", "system": None}], make_tokenizer(CHATML), mapped
    ).report()
    assert (
        "WARNING: column 'system' of 1 rows and column 'input' of 1 rows is not read: write it into" in said
    )
    whole = {
        "messages": [{"role": "system", "content": "s"}, user("a"), assistant("b")],
        "system": "s",
        "input": "a",
    }
    assert "not read" not in SftDataset([whole], make_tokenizer(CHATML), at_most(99)).report()


def test_tools_of_a_row_reach_the_template() -> None:
    tokenizer = make_tokenizer("{% for t in tools or [] %}[{{ t['name'] }}]{% endfor %}" + CHATML)
    rows = [{"messages": [user("hi"), assistant("yo")], "tools": json.dumps([{"name": "add"}])}]
    dataset = SftDataset(rows, tokenizer, at_most(200))
    assert tokenizer.decode(list(dataset[0].token_ids)).startswith("[add]<|im_start|>user")
    assert trained(tokenizer, dataset) == ["yo<|im_end|>"]


def test_long_conversations_are_dropped_and_counted() -> None:
    # 19 tokens of the template before the answer and 2 after it, plus question and answer.
    rows = [{"messages": [user("q"), assistant("a" * count)]} for count in (1, 30, 5)]
    dataset = SftDataset(rows, make_tokenizer(CHATML), at_most(27))
    assert [dataset[index].row for index in range(len(dataset))] == [0, 2]
    assert [len(dataset[index].token_ids) for index in range(2)] == [23, 27]
    assert dataset.report() == (
        "train: 2 conversations of 23 to 27 tokens (median 23), 8 of 50 tokens trained; dropped 1 (33.3 %) "
        "longer than sft.data.max_tokens=27"
    )
    with pytest.raises(ValueError, match="no train conversation is left.*the shortest has 23 tokens"):
        SftDataset(rows, make_tokenizer(CHATML), at_most(22))


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_conversations_are_cut_at_one_end_and_counted(side: str) -> None:
    rows = [{"messages": [user("q"), assistant("abcdefgh")]}, {"messages": [user("q"), assistant("x")]}]
    tokenizer = make_tokenizer(CHATML)
    whole = SftDataset(rows, tokenizer, at_most(99))[0]
    assert len(whole.token_ids) == 30
    dataset = SftDataset(rows, tokenizer, at_most(24, truncation=side))
    cut, short = dataset
    kept = slice(0, 24) if side == "right" else slice(6, 30)
    assert (cut.token_ids, cut.loss_mask) == (whole.token_ids[kept], whole.loss_mask[kept])
    assert trained(tokenizer, dataset)[0] == ("abcd" if side == "right" else "abcdefgh<|im_end|>")
    assert short.token_ids == SftDataset(rows, tokenizer, at_most(99))[1].token_ids
    assert f"; cut ({side}) 1 (50.0 %) longer than sft.data.max_tokens=24" in dataset.report()


def test_what_is_cut_to_nothing_is_left_out_and_the_first_token_is_never_trained() -> None:
    rows = [{"messages": [user("q"), assistant("abcdefgh")]}, {"messages": [user("q"), assistant("x")]}]
    tokenizer = make_tokenizer(CHATML)
    kept = SftDataset(rows, tokenizer, at_most(23, truncation="right"))
    assert [one.row for one in kept] == [0, 1]
    few = SftDataset(
        [*rows, {"messages": [user("q" * 30), assistant("abc")]}], tokenizer, at_most(23, truncation="right")
    )
    assert [one.row for one in few] == [0, 1]
    assert "dropped 1 (33.3 %), cut (right) 1 (33.3 %) longer than" in few.report()
    (ends,) = SftDataset(rows[:1], tokenizer, at_most(5, truncation="left"))
    assert ends.loss_mask[0] is False
    assert any(ends.loss_mask)


def test_a_long_conversation_is_an_error_where_it_should_be() -> None:
    rows = [{"messages": [user("q"), assistant("x")]}, {"messages": [user("q"), assistant("a" * 30)]}]
    with pytest.raises(
        ValueError, match=r"train row 1 has 52 tokens, over sft.data.max_tokens=27.*drop, left, right"
    ):
        SftDataset(rows, make_tokenizer(CHATML), at_most(27, truncation="error"))


def test_text_after_a_control_token_within_an_answer_is_trained() -> None:
    template = "{% for m in messages %}{{ m['role'] + '|' + m['content'] + '\\n' }}{% endfor %}"
    tokenizer = make_tokenizer(template + "{% if add_generation_prompt %}{{ 'assistant|' }}{% endif %}")
    rows = [{"messages": [user("hi"), assistant("<|im_start|>yo")]}]
    assert trained(tokenizer, SftDataset(rows, tokenizer, at_most(100))) == ["<|im_start|>yo\n"]


def test_answers_without_an_end_are_reported() -> None:
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    tokenizer = make_tokenizer(template)
    dataset = SftDataset([{"messages": [user("hi"), assistant("yo")]}], tokenizer, at_most(100))
    assert trained(tokenizer, dataset) == ["yo\n"]  # here the new line is what ends a turn
    assert "WARNING: 1 answers end without a control token" in dataset.report()
    assert (
        "WARNING" not in SftDataset([{"messages": TWO_TURNS}], make_tokenizer(CHATML), at_most(200)).report()
    )


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (
            {"text": "hi"},
            "neither 'messages' nor both 'prompt' and 'completion'; columns found: text. Map them",
        ),
        ({"prompt": "hi"}, "columns found: prompt"),
        ({"messages": [user("hi")]}, r"train row 0 has no assistant message to train on.*\(roles: user\)"),
        ({"messages": [assistant("hi"), user("yo")]}, r"\(roles: assistant, user\)"),
        ({"messages": [{"role": 3}]}, "message 1 of column 'messages'"),
        ({"prompt": "hi", "completion": [user("x")]}, "no assistant message to train on"),
    ],
)
def test_malformed_rows_are_named(row: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SftDataset([row], make_tokenizer(CHATML), at_most(100))


def test_a_template_that_drops_answers_is_refused() -> None:
    template = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="train row 0: the assistant turns render to no tokens"):
        SftDataset([{"messages": [user("hi"), assistant("yo")]}], make_tokenizer(template), at_most(100))


def test_other_column_names() -> None:
    tokenizer = make_tokenizer(CHATML)
    rows = [{"q": "hi", "a": "yo"}, {"talk": TWO_TURNS}]
    dataset = SftDataset(
        rows, tokenizer, at_most(200, messages_key="talk", prompt_key="q", completion_key="a")
    )
    assert trained(tokenizer, dataset, 0) == ["yo<|im_end|>"]
    assert len(trained(tokenizer, dataset, 1)) == 2


def test_a_tokenizer_without_chat_template_or_no_rows() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        SftDataset([{"messages": TWO_TURNS}], make_tokenizer(None), at_most(100))
    with pytest.raises(ValueError, match="val data has no rows; check sft.data.val_files"):
        SftDataset([], make_tokenizer(CHATML), at_most(100), split="val")


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="sft.data.max_tokens is 0"):
        SftDataConfig(max_tokens=0)
    with pytest.raises(ValueError, match="sft.data.messages_key is '', but it needs text that is not empty"):
        SftDataConfig(messages_key="")


# Tool calls as the templates of Qwen models write them: a JSON object within tags, the arguments as an object.
TOOLS = """\
{%- for t in tools or [] %}{{ '<|im_start|>tools\\n' + (t | tojson) + '<|im_end|>\\n' }}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] }}
{%- for call in m['tool_calls'] or [] %}
{{- '<call>' + call['function']['name'] + (call['function']['arguments'] | tojson) + '</call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is false %}{{ '<think></think>' }}{% endif %}{% endif %}"""


def calling(arguments: Any, **changes: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **changes}


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_tool_calls_are_trained_and_what_tools_answer_is_not(arguments: Any) -> None:
    tokenizer = make_tokenizer(TOOLS)
    messages = [
        user("1+1?"),
        calling(arguments, content=None),
        {"role": "tool", "content": "2", "tool_calls": None},
        {"role": "tool", "content": "two"},
        calling(arguments, content="again: "),
        {"role": "tool", "content": "2"},
        assistant("it is 2"),
    ]
    dataset = SftDataset([{"messages": messages, "tools": [{"name": "add"}]}], tokenizer, at_most(400))
    assert trained(tokenizer, dataset) == [
        '<call>add{"a": 1}</call><|im_end|>',
        'again: <call>add{"a": 1}</call><|im_end|>',
        "it is 2<|im_end|>",
    ]
    text = tokenizer.decode(list(dataset[0].token_ids))
    assert text.startswith('<|im_start|>tools\n{"name": "add"}<|im_end|>\n<|im_start|>user')
    assert "<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\ntwo<|im_end|>" in text


def test_a_null_in_arguments_written_as_text_is_an_argument() -> None:
    tokenizer = make_tokenizer(TOOLS)
    dataset = SftDataset([{"messages": [user("q"), calling('{"a": null}')]}], tokenizer, at_most(200))
    assert trained(tokenizer, dataset) == ['<call>add{"a": null}</call><|im_end|>']


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (calling("{a: 1}"), "message 2 of column 'messages' has the tool call dict .*its JSON text"),
        (calling("[1]"), "a tool call has a name, and as arguments an object"),
        (
            {"role": "assistant", "tool_calls": "add(1)"},
            "has tool_calls str 'add\\(1\\)'; they must be a list",
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}, "a tool call has a name"),
    ],
)
def test_broken_tool_calls_are_named(message: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=f"train row 0: .*{match}"):
        SftDataset([{"messages": [user("q"), message]}], make_tokenizer(TOOLS), at_most(200))


def test_thinking_is_switched_by_row() -> None:
    # A template that opens the answer with an empty thought when thinking is off, also in the whole conversation.
    template = TOOLS.replace(
        "'\\n' + m['content'] }}",
        "'\\n' + ('<think></think>' if m['role'] == 'assistant' and enable_thinking is false else '')"
        " + m['content'] }}",
    )
    assert template != TOOLS
    tokenizer = make_tokenizer(template)
    rows = [
        {"messages": [user("hi"), assistant("yo")], "enable_thinking": flag} for flag in (True, False, None)
    ]
    dataset = SftDataset(rows, tokenizer, at_most(200, chat_template_kwargs={"enable_thinking": False}))
    texts = [tokenizer.decode(list(dataset[index].token_ids)) for index in range(3)]
    assert ["<think></think>yo" in text for text in texts] == [False, True, True]
    assert [trained(tokenizer, dataset, index) for index in range(3)] == [["yo<|im_end|>"]] * 3
    with pytest.raises(
        ValueError, match="column 'enable_thinking' holds str 'false'; it must be true or false"
    ):
        SftDataset([{**rows[0], "enable_thinking": "false"}], tokenizer, at_most(200))


def test_rows_that_cannot_be_used_are_told_together() -> None:
    good = {"messages": [user("hi"), assistant("yo")]}
    rows = [good, {"messages": None}, {"messages": [user("hi")]}, {"prompt": "a", "completion": None}, good]
    with pytest.raises(ValueError) as error:
        SftDataset(rows, make_tokenizer(CHATML), at_most(200))
    assert str(error.value).splitlines() == [
        "3 of 5 train rows cannot be used; mend them, or take them out of sft.data.train_files:",
        "  - row 1: has null in 'messages', so there is nothing to imitate: give the text, or remove the row",
        (
            "  - row 2: has no assistant message to train on, after a first one of another role (roles: user); add the "
            "answer, or remove the row"
        ),
        "  - row 3: has null in 'completion', so there is nothing to imitate: give the text, or remove the row",
    ]
