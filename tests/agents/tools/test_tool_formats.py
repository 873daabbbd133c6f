"""Tool calls as models write them, well and badly."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_family import family_tokenizer

from strop.agents.tools.formats import FunctionCall, MalformedCall, ParsedTurn, ToolParser, formats
from strop.utils.registry import Registry

SCHEMA = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string"}, "n": {"type": "integer"}, "flag": {"type": "boolean"}},
        },
    },
}
CODER = (
    "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
    "<parameter=flag>\nTrue\n</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "Hm.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1, 2</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"


@pytest.mark.parametrize("spelled", ["</tool_call>", "<tool_call>{</tool_call>", '\\"</tool_call>\\\\'])
def test_a_text_in_a_call_may_spell_the_tag_out(spelled: str) -> None:
    call = f'<tool_call>\n{{"name": "f", "arguments": {{"a": "x {spelled} y"}}}}\n</tool_call>'
    content, calls = read("hermes", f"so {call} and {call}")
    assert content == "so  and"
    assert [json.loads(one.arguments) for one in calls] == [json.loads(f'{{"a": "x {spelled} y"}}')] * 2


def test_a_tag_in_a_text_does_not_end_a_call_that_is_malformed() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": "x </tool_call> y"}}} </tool_call>'
    content, (malformed,) = read("hermes", f"so {call}")
    assert (content, malformed.text) == ("so", call.removeprefix("<tool_call>").removesuffix("</tool_call>"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'),
        ("qwen3_coder", CODER.removeprefix("<tool_call>\n")),
        ("glm", GLM.replace("<tool_call>", "")),
    ],
)
def test_a_call_without_its_first_tag_is_malformed_and_no_answer(name: str, text: str) -> None:
    content, (call,) = read(name, text)
    assert content == ""
    assert call.problem == "A tool call was closed with </tool_call> but not opened with <tool_call>."
    assert len(read("hermes", '<tool_call>{"name": "f"}</tool_call></tool_call>')[1]) == 1, (
        "one too many is text"
    )


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<function=",
    ">",
    "<parameter=a>",
    "<arg_key>",
    "</arg_key>",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    '"name"',
    ":",
    '"f"',
    ",",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<|message|>",
    "<|start|>",
    "to=functions.f",
    "<|channel|>analysis",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "```json",
    "f(a=1)",
    "\\",
    "'",
]


def read(name: str, text: str) -> tuple[str, list[Any]]:
    return formats[name].read(text, [SCHEMA])


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        (
            "hermes",
            'ok <tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>',
            "ok",
            [("f", {"a": "x"})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"n\\": 1}"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
            "",
            [("f", {"n": 1}), ("g", {})],
        ),
        (
            "qwen3_coder",
            CODER,
            "",
            [("f", {"a": "12", "n": 12, "flag": True})],
        ),
        (
            "glm",
            GLM,
            "Hm.",
            [("f", {"a": "1, 2", "n": 3})],
        ),
        (
            "hermes",
            (
                '<tool_call>{"name": "f", "parameters": {"n": 1}}</tool_call>'
                '<tool_call>{"type": "function", "name": "f", "arguments": {"n": 2}, "why": "x"}</tool_call>'
            ),
            "",
            [("f", {"n": 1}), ("f", {"n": 2})],
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "parameters": {"n": 1}}]',
            "",
            [("f", {"n": 1})],
        ),
        ("llama3_json", '{"name": "f", "parameters": {"n": 1}}', "", [("f", {"n": 1})]),
        (
            "llama3_json",
            'Look: <|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"a": ";"}}',
            "Look:",
            [("f", {}), ("g", {"a": ";"})],
        ),
        ("llama3_json", '{"answer": 3}', '{"answer": 3}', []),
        (
            "gpt_oss",
            '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}',
            "",
            [("f", {"n": 1})],
        ),
        ("gpt_oss", " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "", [("f", {})]),
        ("gpt_oss", "<|channel|>final<|message|>It is 3.", "It is 3.", []),
        ("kimi", f'Hm{KIMI}{{"n": 1}}<|tool_call_end|><|tool_calls_section_end|>', "Hm", [("f", {"n": 1})]),
        (
            "deepseek",
            f'{DEEPSEEK}function<｜tool▁sep｜>f\n```json\n{{"n": 1}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "",
            [("f", {"n": 1})],
        ),
        (
            "deepseek",
            f'{DEEPSEEK}f<｜tool▁sep｜>{{"n": 1}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "",
            [("f", {"n": 1})],
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {"n": 1}, "id": "abcdefghi"}]',
            "",
            [("f", {"n": 1})],
        ),
        (
            "mistral",
            'a[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]g[CALL_ID]1[ARGS]{}',
            "a",
            [("f", {"n": 1}), ("g", {})],
        ),
        ("pythonic", "[f(a='x', n=-1), g()]", "", [("f", {"a": "x", "n": -1}), ("g", {})]),
        ("pythonic", "The list [1, 2] is short.", "The list [1, 2] is short.", []),
    ],
)
def test_calls_are_read(name: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    found, read_calls = read(name, text)
    assert found == content
    assert [(call.name, json.loads(call.arguments)) for call in read_calls] == calls


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "f", </tool_call>', "Invalid JSON in tool call"),
        ("hermes", '<tool_call>["f"]</tool_call>', 'must be an object with "name"'),
        ("hermes", '<tool_call>{"name": "f"}', "not closed"),
        ("hermes", '<tool_call>{"name": "f", "args": {"a": "x"}}</tool_call>', 'under "arguments", not'),
        ("hermes", '<tool_call>{"name": "f", "a": "x"}</tool_call>', 'not under "a"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}, "a": "x"}</tool_call>', 'not under "a"'),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}, "parameters": {"a": "x"}}</tool_call>',
            "not both",
        ),
        ("llama3_json", '{"name": "f", "input": {"a": "x"}}', 'under "parameters", not under "input"'),
        ("llama3_json", '{"name": "f", "parameters": {}, "arguments": {"a": "x"}}', "not both"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "args": {"a": "x"}}]', 'not under "args"'),
        ("qwen3_coder", '<tool_call><function=f>{"a": "x"}</function></tool_call>', "<parameter=KEY>"),
        (
            "qwen3_coder",
            '<tool_call><function=f><parameter name="a">x</parameter></function></tool_call>',
            "<parameter=KEY>",
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=a>x</parameter><parameter=n\n2</parameter></function></tool_call>",
            "<parameter=KEY>",
        ),
        ("qwen3_coder", "<tool_call><function=f><parameter=a</parameter></function></tool_call>", "=KEY>"),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=a>x</parameter><parameter=a>y</parameter></function></tool_call>",
            'argument "a" is given twice',
        ),
        ("qwen3_coder", "<tool_call><function=f</function></tool_call>", "<function=NAME>"),
        (
            "qwen3_coder",
            "<tool_call><function=f></function><function=g></function></tool_call>",
            "<parameter=KEY>",
        ),
        (
            "glm",
            "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value><arg_value>y</arg_value></tool_call>",
            "needs an <arg_value>",
        ),
        (
            "glm",
            (
                "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value>n=3"
                "<arg_key>n</arg_key><arg_value>2</arg_value></tool_call>"
            ),
            "needs an <arg_value>",
        ),
        (
            "glm",
            (
                "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value>"
                "<arg_key>a</arg_key><arg_value>y</arg_value></tool_call>"
            ),
            "given twice",
        ),
        ("qwen3_coder", "<tool_call>f(1)</tool_call>", "<function=NAME>"),
        ("glm", "<tool_call>f<arg_key>a</arg_key></tool_call>", "needs an <arg_value>"),
        ("glm", "<tool_call>\n</tool_call>", "name of a tool"),
        ("llama3_json", '{"name": "f", "parameters": {', "Invalid JSON"),
        ("llama3_json", "<|python_tag|>print(1)", "Invalid JSON"),
        ("gpt_oss", " to=functions.f<|channel|>commentary {}", "needs <|message|>"),
        ("kimi", "<|tool_calls_section_begin|>f", "there is none"),
        ("kimi", KIMI.replace("functions.f:0", "f f") + "{}<|tool_call_end|>", "functions.NAME:NUMBER"),
        ("deepseek", "<｜tool▁calls▁begin｜>f()", "there is none"),
        ("deepseek", f"{DEEPSEEK}function<｜tool▁sep｜>f()<｜tool▁call▁end｜>", "a block of JSON"),
        ("mistral", "[TOOL_CALLS] [{]", "Invalid JSON"),
        ("mistral", "[TOOL_CALLS] hello", "JSON list"),
        ("pythonic", "[f(1)]", "by its name"),
        ("pythonic", "[f(a=g())]", "plain values"),
        ("pythonic", "[f(a=0071_0)]", "plain values"),
        ("pythonic", "[f(a=1) for x in (1, 2)]", "not valid Python|list of calls|must be a call"),
        ("pythonic", "[f(a=)]", "not valid Python"),
    ],
)
def test_malformed_calls_are_told_as_such(name: str, text: str, problem: str) -> None:
    _, calls = read(name, text)
    if not calls:
        pytest.fail("the call was taken for text")
    (call,) = calls
    assert isinstance(call, MalformedCall)
    assert any(part in call.problem for part in problem.split("|"))


@pytest.mark.parametrize(
    ("name", "begin", "whole", "broken"),
    [
        (
            "kimi",
            "<|tool_calls_section_begin|>",
            '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"n": 1}<|tool_call_end|>',
            '<|tool_call_begin|>functions.f:1 {"n": 2}<|tool_call_end|>',
        ),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜>",
            '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>',
            '<｜tool▁call▁begin｜>f{"n": 2}<｜tool▁call▁end｜>',
        ),
    ],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_a_call_without_its_separator_is_malformed_beside_others(
    name: str, begin: str, whole: str, broken: str, is_first: bool
) -> None:
    _, calls = read(name, begin + (broken + whole if is_first else whole + broken))
    malformed, good = calls if is_first else reversed(calls)
    assert isinstance(malformed, MalformedCall)
    assert "before its arguments" in malformed.problem
    assert (good.name, json.loads(good.arguments)) == ("f", {"n": 1})


@pytest.mark.parametrize("name", sorted(formats))
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=12))
def test_no_text_makes_a_format_fail(name: str, pieces: list[str]) -> None:
    content, calls = read(name, "".join(pieces))
    assert isinstance(content, str)
    assert all(isinstance(call, FunctionCall | MalformedCall) for call in calls)


def parse(name: str, family: str, text: str, *, begins: bool = False) -> ParsedTurn:
    tokenizer = family_tokenizer(family)
    parser = ToolParser.get_tool_parser(name, tokenizer)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return asyncio.run(parser.parse(ids, [SCHEMA], begins_in_thinking=begins))


def test_calls_in_the_thinking_are_not_calls() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    turn = parse("hermes", "qwen3", f"<think>\nI could {call}\n</think>\n\nNo.<|im_end|>")
    assert (turn.content, turn.calls, turn.reasoning) == ("No.", (), f"\nI could {call}\n")
    assert parse("hermes", "qwen3", f"<think>\n{call}").calls == ()
    assert parse("hermes", "qwen3", f"I could {call}", begins=True).calls == ()
    assert parse("hermes", "qwen3", f"Well.\n</think>{call}", begins=True).calls == (FunctionCall("f", "{}"),)


def test_the_analysis_channel_is_thinking() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f json"
        "<|message|>{}<|call|>"
    )
    turn = parse("gpt_oss", "gpt_oss", text)
    assert (turn.content, turn.calls, turn.reasoning) == ("", (FunctionCall("f", "{}"),), "Hm.")


def test_formats_name_the_tokens_that_end_their_answers() -> None:
    tokenizer = family_tokenizer("gpt_oss")
    expected = [tokenizer.convert_tokens_to_ids(name) for name in ("<|call|>", "<|return|>")]
    assert ToolParser.get_tool_parser("gpt_oss", tokenizer).stop_token_ids == expected
    assert ToolParser.get_tool_parser("hermes", tokenizer).stop_token_ids == []


def test_a_parser_of_ones_own_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.agents.tools.formats.parser.tool_parsers", Registry("tool format"))

    @ToolParser.register("shout")
    class Shout(ToolParser):
        async def extract_tool_calls(
            self, ids: list[int], tools: Any = None
        ) -> tuple[str, list[FunctionCall]]:
            text = self.tokenizer.decode(ids)
            return text, [FunctionCall("f", "{}")] if "!" in text else []

    assert parse("shout", "qwen25", "now!").calls == (FunctionCall("f", "{}"),)
    with pytest.raises(ValueError, match="tool format 'hermes' is already registered"):
        ToolParser.register("hermes")(Shout)
    with pytest.raises(ValueError, match="unknown tool format 'whisper'; known: deepseek, .*shout"):
        ToolParser.get_tool_parser("whisper", family_tokenizer("qwen25"))


def test_a_built_in_parser_has_the_calling_convention_of_verl() -> None:
    tokenizer = family_tokenizer("qwen25")
    ids = tokenizer('Hm <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><|im_end|>')["input_ids"]
    content, calls = asyncio.run(ToolParser.get_tool_parser("hermes", tokenizer).extract_tool_calls(ids))
    assert content == "Hm"
    assert calls == [FunctionCall("f", '{"a": 1}')]


SPELLED = [
    "</parameter>", "</function>", "</tool_call>", "<tool_call>", "<parameter=path>", "<function=f>", "</arg_value>",
    "<arg_key>", "</arg_key>", "<arg_value>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<|tool_call_end|>",
    "<|tool_call_begin|>", "<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>", "x</parameter>\ny</tool_call>\nz",
    "</tool_call></tool_call>", "a <parameter=path> b </parameter> c", "</parameter></parameter>",
]  # fmt: skip
"""Values that have tags of the formats in them."""


def written_calls(name: str, value: str) -> str:
    """Two calls of f, each with a text before its number, as a chat template writes them."""
    shown = json.dumps({"a": value, "n": 2}, ensure_ascii=False)
    match name:
        case "qwen3_coder":
            return 2 * (
                f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
                f"</function>\n</tool_call>\n"
            )
        case "glm":
            return 2 * (
                f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n<arg_key>n</arg_key>\n"
                f"<arg_value>2</arg_value>\n</tool_call>\n"
            )
        case "hermes":
            return 2 * f'<tool_call>\n{{"name": "f", "arguments": {shown}}}\n</tool_call>\n'
        case "mistral":
            return 2 * f"[TOOL_CALLS]f[ARGS]{shown}"
        case "mistral_list":
            return f'[TOOL_CALLS] [{", ".join([f"""{{"name": "f", "arguments": {shown}}}"""] * 2)}]'
        case "kimi":
            call = f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{shown}<|tool_call_end|>"
            return f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"
        case "deepseek":
            fenced = f"function<｜tool▁sep｜>f\n```json\n{shown}\n```"
            second = f"<｜tool▁call▁begin｜>{fenced}<｜tool▁call▁end｜>"
            return f"{DEEPSEEK}f<｜tool▁sep｜>{shown}<｜tool▁call▁end｜>{second}"
    raise AssertionError(name)


@pytest.mark.parametrize("value", SPELLED)
@pytest.mark.parametrize(
    "name", ["qwen3_coder", "glm", "hermes", "mistral", "mistral_list", "kimi", "deepseek"]
)
def test_an_argument_may_spell_out_the_tags_of_its_format(name: str, value: str) -> None:
    if name == "glm" and "</arg_value>" in value and "<arg_value>" in value:
        pytest.skip("two tags that stand as between arguments")
    content, calls = read(name.removesuffix("_list"), "so " + written_calls(name, value))
    assert content == "so"
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", {"a": value, "n": 2})] * 2


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        # Tags that models leave out, as the parsers of vLLM read them.
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=a>1<parameter=n>2</function></tool_call>",
            ["1", 2],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=a>1</parameter><parameter=n>2</tool_call>",
            ["1", 2],
        ),
        (
            "qwen3_coder",
            (
                "<tool_call><function=f><parameter=a>1</parameter></tool_call> and "
                "<tool_call><function=f><parameter=n>2</parameter></function></tool_call>"
            ),
            ["1", 2],
        ),
        (
            "glm",
            (
                "<tool_call>f</tool_call> and <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value>"
                "<arg_key>n</arg_key><arg_value>2</arg_value></tool_call>"
            ),
            ["1", 2],
        ),
    ],
)
def test_a_call_ends_before_the_next_one_also_where_tags_are_missing(
    name: str, text: str, arguments: list[Any]
) -> None:
    _, calls = read(name, text)
    assert all(isinstance(call, FunctionCall) for call in calls)
    merged: dict[str, Any] = {}
    for call in calls:
        merged |= json.loads(call.arguments)
    assert [merged["a"], merged["n"]] == arguments
    assert len(calls) == text.count("<tool_call>")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1<arg_key>n</arg_key><arg_value>2</arg_value></tool_call>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter> hm <parameter=n>2</parameter></tool_call>"),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1</parameter> hm</function></tool_call>"),
    ],
)  # fmt: skip
def test_text_between_arguments_is_not_put_into_one(name: str, text: str) -> None:
    _, (call,) = read(name, text)
    assert isinstance(call, MalformedCall)


CALL_WITH_TAG = '<tool_call>{"name": "f", "arguments": {"a": "ends with </think> here"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "begins", "reasoning"),
    [
        (CALL_WITH_TAG, False, ""),
        (f"<think>hm</think>{CALL_WITH_TAG}", False, "hm"),
        (f"hm</think>\n{CALL_WITH_TAG}", True, "hm"),
        (f"hm</think>\n{CALL_WITH_TAG}", False, "hm"),
        (CALL_WITH_TAG.replace("ends", "<think> ends"), False, ""),
    ],
)
def test_a_call_whose_argument_closes_thinking_is_made(text: str, begins: bool, reasoning: str) -> None:
    turn = parse("hermes", "qwen3", text, begins=begins)
    (call,) = turn.calls
    assert isinstance(call, FunctionCall)
    assert json.loads(call.arguments)["a"].endswith("ends with </think> here")
    assert (turn.content, turn.reasoning) == ("", reasoning)


def test_a_call_in_the_thinking_is_none_also_where_it_closes_thinking() -> None:
    turn = parse("hermes", "qwen3", f"<think>I could {CALL_WITH_TAG} but</think>No.")
    assert (turn.content, turn.calls) == ("No.", ())
